use towpath_wire::Ends;

use super::*;
use crate::reorder::{Limits, ReorderBuffer};
use towpath_ring::{ReserveError, Seq};

/// The result for one frame.
type FrameResult = Result<Decision<'static>, DropReason>;

/// An inspector in memory. The next poll returns `verdicts`.
#[derive(Debug, Default)]
struct Fake {
    next: u32,
    room: usize,
    verdicts: Vec<(u32, FrameResult)>,
    dead: bool,
    unreturned: u32,
    returned: u64,
    kicks: u32,
    polls: u32,
    arms: u32,
    detached: Option<Detached>,
    lost: Vec<Loss>,
}

impl Channel for Fake {
    fn publish(&mut self, _frame: &[u8], _meta: &Meta) -> Result<Seq, ReserveError> {
        self.room = self.room.checked_sub(1).ok_or(ReserveError::RingFull)?;
        self.next = self.next.wrapping_add(1);
        Ok(Seq(self.next.wrapping_sub(1)))
    }
    fn lose(&mut self, loss: Loss) {
        self.lost.push(loss);
    }
    fn kick(&mut self) {
        self.kicks += 1;
    }
    fn arm(&mut self) -> bool {
        self.arms += 1;
        true
    }
    fn returned(&self) -> u64 {
        self.returned
    }
    fn poll(&mut self, _now: u64, each: &mut dyn FnMut(Seq, Result<Decision<'_>, DropReason>)) -> usize {
        self.polls += 1;
        let n = self.verdicts.len();
        self.verdicts.drain(..).for_each(|(seq, verdict)| each(Seq(seq), verdict));
        n
    }
    fn wait(&mut self, _now: u64, _until: u64) {}
    fn unreturned(&self) -> u32 {
        self.unreturned
    }
    fn is_dead(&self) -> bool {
        self.dead
    }
    fn detached(&mut self) -> Option<Detached> {
        self.detached.take()
    }
}

const POLICY: Policy = Policy {
    deadline: 100,
    stall: u64::MAX,
    default: DefaultVerdict::Drop,
    fanout: Fanout::FlowHash,
    overload: Overload::Block,
    high: u32::MAX,
    low: u32::MAX,
    may_queue: Vec::new(),
    share: 1,
};

const HELD: Enqueue = Enqueue::Held(Account::ENGINE);
const FULL: Enqueue = Enqueue::Lost(Some(DropReason::QueueFull));
const PASS: FrameResult = decided(Verdict::Pass);
const DROP: FrameResult = decided(Verdict::Drop);
const OVERDUE: FrameResult = Err(DropReason::Overdue);
const DIED: FrameResult = Err(DropReason::InspectorDied);

const fn decided(verdict: Verdict<'static>) -> FrameResult {
    Ok(Decision { verdict, mark: 0, mask: 0, flow: false, cause: ring::Cause::Single })
}

fn ids(n: usize) -> Vec<PacketId> {
    let mut buffer = ReorderBuffer::<(), ()>::new(1, Limits::default(), true);
    (0..n).map(|_| buffer.push_waiting(b"", (), (), (0, Account::ENGINE))).collect()
}

fn queue<const N: usize>(policy: Policy, fakes: [Fake; N]) -> Queue<Fake> {
    let mut queue = Queue::new(1, policy);
    for (number, fake) in (1..).zip(fakes) {
        queue.join(number, fake);
    }
    queue
}

fn room(room: usize) -> Fake {
    Fake { room, ..Fake::default() }
}

fn offer(queue: &mut Queue<Fake>, id: Option<PacketId>) -> Enqueue {
    match queue.enqueue(b"x", &Meta::default(), 0, 0, id, &Shares::new(Limits::default(), true)) {
        Enqueue::Held(_) => HELD,
        other => other,
    }
}

/// The inspector at `index` gives these verdicts. Returns the verdicts of the queue.
fn give(queue: &mut Queue<Fake>, index: usize, verdicts: &[(u32, FrameResult)]) -> Vec<(PacketId, String)> {
    fake(queue, index).verdicts = verdicts.to_vec();
    poll(queue)
}

fn fake(queue: &mut Queue<Fake>, index: usize) -> &mut Fake {
    queue.inspectors().nth(index).unwrap().channel_mut()
}

fn poll(queue: &mut Queue<Fake>) -> Vec<(PacketId, String)> {
    poll_at(queue, 0)
}

fn poll_at(queue: &mut Queue<Fake>, now: u64) -> Vec<(PacketId, String)> {
    let mut out = Vec::new();
    queue.poll(now, &mut |_, _| Ok(()), |id, verdict| {
        let text = match verdict {
            QueueVerdict::Decided(Decision { verdict, .. }, _) => format!("{verdict:?}"),
            other => format!("{other:?}"),
        };
        out.push((id, text));
    });
    let c = queue.stats();
    assert_eq!(c.frames, c.passed + c.dropped + c.replaced + c.lost() + c.open);
    out
}

#[test]
fn verdicts_are_accepted_in_any_order() {
    let mut queue = queue(POLICY, [Fake { next: u32::MAX, room: 9, ..Fake::default() }]);
    let t = ids(3);
    for &id in &t {
        assert_eq!(offer(&mut queue, Some(id)), HELD);
    }
    let got = give(&mut queue, 0, &[(1, DROP), (0, decided(Verdict::Replace(b"y")))]);
    assert_eq!(got, [(t[2], "Drop".into()), (t[1], "Replace([121])".into())]);
    assert_eq!(queue.open(), 1);
    assert_eq!(give(&mut queue, 0, &[(u32::MAX, OVERDUE)]), [(t[0], "Lost(Some(Overdue))".into())]);
    let c = queue.stats();
    assert_eq!((c.frames, c.passed, c.dropped, c.replaced, c.lost(), c.high_water), (3, 0, 1, 1, 1, 3));
}

#[test]
fn sequence_numbers_of_gap_records_are_skipped() {
    let mut queue = queue(POLICY, [room(9)]);
    let t = ids(2);
    offer(&mut queue, Some(t[0]));
    fake(&mut queue, 0).next += 3;
    offer(&mut queue, Some(t[1]));
    assert_eq!(give(&mut queue, 0, &[(4, PASS)]), [(t[1], "Pass".into())]);
    assert_eq!(give(&mut queue, 0, &[(0, PASS)]), [(t[0], "Pass".into())]);
    assert_eq!(queue.open(), 0);
}

#[test]
fn frames_of_a_dead_inspector_are_lost() {
    let mut queue = queue(POLICY, [room(9)]);
    let t = ids(2);
    offer(&mut queue, Some(t[0]));
    offer(&mut queue, None);
    let fake = fake(&mut queue, 0);
    fake.dead = true;
    fake.detached = Some(Detached { why: "killed".into(), distrusted: false });
    let got = give(&mut queue, 0, &[(0, DIED), (1, DIED)]);
    assert_eq!(got, [(t[0], "Lost(Some(InspectorDied))".into())]);
    assert_eq!(offer(&mut queue, Some(t[1])), Enqueue::Lost(Some(DropReason::NoInspector)));
    let c = queue.stats();
    assert_eq!((c.frames, c.lost(), queue.trouble.as_deref()), (3, 3, Some("killed")));
    assert_eq!((c.inspector_died, c.no_inspector), (2, 1));
}

#[test]
fn frames_of_a_dead_inspector_are_redelivered() {
    let mut queue = queue(Policy { fanout: Fanout::LeastLoaded, ..POLICY }, [room(9), room(9)]);
    let t = ids(2);
    offer(&mut queue, Some(t[0]));
    offer(&mut queue, Some(t[1]));
    fake(&mut queue, 0).dead = true;
    assert_eq!(give(&mut queue, 0, &[(0, DIED)]), [(t[0], "Redeliver".into())]);
    assert_eq!(queue.stats().frames, 1, "the frame counts when it is delivered");
    assert_eq!(offer(&mut queue, Some(t[0])), HELD);
    assert_eq!(give(&mut queue, 1, &[(0, PASS), (1, DROP)]), [(t[1], "Pass".into()), (t[0], "Drop".into())]);
    let c = queue.stats();
    assert_eq!((c.frames, c.passed, c.dropped, c.lost(), c.redelivered), (2, 1, 1, 0, 1));
}

#[test]
fn the_strictest_verdict_of_a_broadcast_wins() {
    let rows: &[(FrameResult, FrameResult, &str)] = &[
        (PASS, PASS, "Pass"),
        (PASS, DROP, "Drop"),
        (DROP, decided(Verdict::Reject), "Reject"),
        (decided(Verdict::Reject), DROP, "Reject"),
        (PASS, decided(Verdict::Replace(b"y")), "Replace([121])"),
        (decided(Verdict::Queue(4)), decided(Verdict::Repeat), "Queue(4)"),
        (PASS, OVERDUE, "Lost(Some(Overdue))"),
        (DIED, PASS, "Lost(Some(InspectorDied))"),
    ];
    for (first, second, expected) in rows {
        let policy = Policy { fanout: Fanout::Broadcast, may_queue: vec![4], ..POLICY };
        let mut queue = queue(policy, [room(9), room(9)]);
        let t = ids(1);
        assert_eq!(offer(&mut queue, Some(t[0])), HELD);
        assert_eq!(give(&mut queue, 1, &[(0, *second)]), []);
        let got = give(&mut queue, 0, &[(0, *first)]);
        // The second inspector decides first, and the first of two equally strict verdicts wins.
        let expected = if *expected == "Queue(4)" { "Repeat" } else { expected };
        assert_eq!(got, [(t[0], expected.to_owned())], "{first:?} {second:?}");
        assert_eq!(queue.stats().frames, 2);
    }
}

#[test]
fn a_mirror_gets_copies() {
    let mut queue = queue(Policy { fanout: Fanout::Mirror, ..POLICY }, [room(9), room(1)]);
    let t = ids(2);
    assert_eq!(offer(&mut queue, Some(t[0])), Enqueue::Copied);
    assert_eq!(offer(&mut queue, Some(t[1])), Enqueue::Copied);
    assert_eq!(fake(&mut queue, 1).lost, [Loss::NoRoom]);
    assert_eq!(give(&mut queue, 0, &[(0, DROP), (1, PASS)]), []);
    assert_eq!(queue.stats().frames, 3);
}

#[test]
fn a_turn_makes_a_bounded_number_of_copies() {
    let budget = copy_budget::COPIES;
    for (fanout, copies, made) in [(Fanout::Mirror, 2, Enqueue::Copied), (Fanout::FlowHash, 1, HELD)] {
        let mut queue = queue(Policy { fanout, ..POLICY }, [room(9999), room(9999)]);
        queue.begin_turn();
        assert!((0..budget / copies).all(|_| offer(&mut queue, None) == made), "{fanout:?}");
        assert_eq!(offer(&mut queue, None), Enqueue::Lost(None));
        let lost: usize = queue.inspectors().map(|slot| slot.channel_mut().lost.len()).sum();
        assert_eq!(lost as u32, copies, "each watcher that missed a copy knows");
        let stats = queue.stats();
        assert_eq!((stats.copy_budget, stats.lost()), (copies.into(), copies.into()), "{fanout:?}");
        assert_eq!(stats.frames, stats.lost() + stats.open);
        // A packet that waits for a verdict is no copy.
        let packet = ids(1)[0];
        let waits = if fanout == Fanout::Mirror { Enqueue::Lost(None) } else { HELD };
        assert_eq!(offer(&mut queue, Some(packet)), waits);
        queue.begin_turn();
        assert_eq!(offer(&mut queue, None), made, "the next turn");
    }
}

#[test]
fn the_overload_policy_applies_without_room() {
    let rows = [
        (Overload::Block, Enqueue::Full),
        (Overload::DropNewest, FULL),
        (Overload::DropOldest(1), Enqueue::Full),
        (Overload::Pass, Enqueue::Lost(None)),
        (Overload::Drop, FULL),
        (Overload::Queue(7), Enqueue::Queue(7)),
    ];
    for (overload, expected) in rows {
        let mut queue = queue(Policy { overload, ..POLICY }, [room(1)]);
        let t = ids(2);
        assert_eq!(offer(&mut queue, Some(t[0])), HELD);
        assert_eq!(offer(&mut queue, Some(t[1])), expected, "{overload:?}");
        let lost = u64::from(matches!(expected, Enqueue::Lost(_)));
        assert_eq!(queue.stats().queue_full, lost, "{overload:?}");
        poll(&mut queue);
    }
}

#[test]
fn a_full_backlog_drops_the_oldest_packet() {
    let mut queue = queue(Policy { overload: Overload::DropOldest(2), ..POLICY }, [room(0)]);
    let t = ids(4);
    assert_eq!(queue.push_backlog(t[0]), Ok(None));
    assert_eq!(queue.push_backlog(t[1]), Ok(None));
    assert_eq!(queue.push_backlog(t[2]), Ok(Some(t[0])));
    assert_eq!(queue.next_in_backlog(), Some(t[1]));
    queue.pop_backlog();
    assert_eq!(queue.next_in_backlog(), Some(t[2]));
    assert_eq!((queue.stats().frames, queue.stats().lost()), (1, 1));
    assert_eq!(fake(&mut queue, 0).lost, [Loss::Oldest]);
    // A copy does not wait.
    assert_eq!(offer(&mut queue, None), FULL);
}

#[test]
fn an_inspector_above_the_high_mark_has_no_room() {
    let policy = Policy { overload: Overload::Pass, high: 2, low: 0, ..POLICY };
    let mut queue = queue(policy, [room(9)]);
    let t = ids(4);
    assert_eq!(offer(&mut queue, Some(t[0])), HELD);
    assert_eq!(offer(&mut queue, Some(t[1])), HELD);
    assert_eq!(offer(&mut queue, Some(t[2])), Enqueue::Lost(None));
    give(&mut queue, 0, &[(0, PASS)]);
    assert_eq!(offer(&mut queue, Some(t[2])), Enqueue::Lost(None));
    fake(&mut queue, 0).unreturned = 1;
    give(&mut queue, 0, &[(1, OVERDUE)]);
    assert_eq!(
        offer(&mut queue, Some(t[2])),
        Enqueue::Lost(None),
        "the inspector still has the overdue frame"
    );
    fake(&mut queue, 0).unreturned = 0;
    assert_eq!(offer(&mut queue, Some(t[3])), HELD);
}

#[test]
fn packets_do_not_wait_for_a_stalled_inspector() {
    let mut queue = queue(POLICY, [room(1)]);
    let t = ids(3);
    assert_eq!(offer(&mut queue, Some(t[0])), HELD);
    assert_eq!(offer(&mut queue, Some(t[1])), Enqueue::Full);
    assert_eq!(queue.give_up(&Meta::default(), 0), Some(DropReason::QueueFull));
    assert_eq!(offer(&mut queue, Some(t[1])), FULL);
    assert_eq!(give(&mut queue, 0, &[(0, PASS)]), [(t[0], "Pass".into())]);
    assert_eq!(offer(&mut queue, Some(t[2])), Enqueue::Full);
    let c = queue.stats();
    assert_eq!((c.frames, c.passed, c.lost()), (3, 1, 2));
}

#[test]
fn frames_of_a_queue_without_inspectors_are_lost() {
    let mut queue = queue(Policy { default: DefaultVerdict::Pass, ..POLICY }, []);
    assert_eq!(offer(&mut queue, None), Enqueue::Lost(None));
    assert_eq!((queue.stats().frames, queue.stats().lost()), (1, 1));
}

#[test]
fn flow_verdicts_of_a_distrusted_inspector_end() {
    for (distrusted, left) in [(true, None), (false, Some(Verdict::Pass))] {
        let mut queue = queue(POLICY, [room(9)]);
        let ends = Ends::V4([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let flow = Flow { ends, proto: 17, src_port: 5, dst_port: 6, zone: 0 };
        let now = Time::default();
        let verdict = FlowVerdict { verdict: Verdict::Pass, mark: (0, 0), channel: 1 };
        queue.set_flow_verdict(&flow, verdict, now, None);
        assert!(queue.flow_verdict(&flow, false, now, None).is_some());
        let fake = fake(&mut queue, 0);
        fake.detached = Some(Detached { why: "gone".into(), distrusted });
        poll(&mut queue);
        assert_eq!(queue.flow_verdict(&flow, false, now, None).map(|found| found.verdict), left);
    }
}

/// Offers a packet of the flow with this hash at a time. Returns the index of the inspector that has it.
fn offer_at(queue: &mut Queue<Fake>, now: u64, hash: u32) -> Option<usize> {
    let id = ids(1)[0];
    let before: Vec<u32> = queue.inspectors().map(|slot| slot.channel().next).collect();
    let meta = Meta { hash, ..Meta::default() };
    let offered = queue.enqueue(b"x", &meta, 0, now, Some(id), &Shares::new(Limits::default(), true));
    matches!(offered, Enqueue::Held(_)).then(|| {
        let moved = |(slot, before): (&mut InspectorSlot<Fake>, &u32)| slot.channel().next != *before;
        queue.inspectors().zip(&before).position(moved).unwrap()
    })
}

/// All frames of the inspector at `index` have this result, at a time.
fn all_at(queue: &mut Queue<Fake>, index: usize, now: u64, result: FrameResult) {
    let slot = queue.inspectors().nth(index).unwrap();
    let (open, next) = (slot.open(), slot.channel().next);
    slot.channel_mut().verdicts = (next - open..next).map(|seq| (seq, result)).collect();
    queue.poll(now, &mut |_, _| Ok(()), |_, _| {});
    let c = queue.stats();
    assert_eq!(c.frames, c.passed + c.dropped + c.replaced + c.lost() + c.open);
}

fn stalled(queue: &mut Queue<Fake>) -> u64 {
    queue.snapshot(&Shares::new(Limits::default(), true)).stats.stalled
}

#[test]
fn flows_of_a_stalled_inspector_go_to_the_others() {
    let mut queue = queue(Policy { stall: 300, ..POLICY }, [room(999), room(999)]);
    let hung = offer_at(&mut queue, 0, 7).unwrap();
    for (now, still) in [(100, 0), (200, 0), (299, 0), (300, 1)] {
        all_at(&mut queue, hung, now, OVERDUE);
        assert_eq!(stalled(&mut queue), still, "{now}");
        if still == 0 {
            assert_eq!(offer_at(&mut queue, now, 7), Some(hung), "{now}");
        }
    }
    let reports = queue.take_reports();
    assert_eq!(reports.iter().map(|report| report.answers).collect::<Vec<_>>(), [Answers::Stalled]);
    assert!((0..64).all(|hash| offer_at(&mut queue, 301, hash) == Some(1 - hung)));
    all_at(&mut queue, 1 - hung, 302, PASS);
    // It returns an overdue frame, too late.
    fake(&mut queue, hung).returned = 1;
    poll(&mut queue);
    assert_eq!((stalled(&mut queue), queue.stats().stalls), (0, 1));
    assert_eq!(queue.take_reports().first().map(|report| report.answers), Some(Answers::Again));
    assert_eq!(offer_at(&mut queue, 303, 7), Some(hung));
}

#[test]
fn an_inspector_that_returns_some_frames_does_not_stall() {
    // How it returns a frame between the overdue ones.
    for late in [false, true] {
        let mut queue = queue(Policy { stall: 300, ..POLICY }, [room(999)]);
        for turn in 1..20 {
            assert_eq!(offer_at(&mut queue, turn * 100, 7), Some(0));
            if turn % 2 == 0 {
                fake(&mut queue, 0).returned += u64::from(late);
                all_at(&mut queue, 0, turn * 100, if late { OVERDUE } else { PASS });
            } else {
                all_at(&mut queue, 0, turn * 100, OVERDUE);
            }
        }
        assert_eq!(queue.stats().stalls, 0, "{late}");
    }
    // One frame is never returned, and nothing else arrives.
    let mut queue = queue(Policy { stall: 300, ..POLICY }, [room(999)]);
    assert_eq!(offer_at(&mut queue, 0, 7), Some(0));
    for now in [100, 1000, 100_000] {
        all_at(&mut queue, 0, now, OVERDUE);
        fake(&mut queue, 0).verdicts.clear();
    }
    assert_eq!(queue.stats().stalls, 0);
    // Copies need no verdict.
    let mut queue = self::queue(Policy { stall: 300, ..POLICY }, [room(999)]);
    for now in [0, 100, 1000, 100_000] {
        assert_eq!(offer(&mut queue, None), HELD);
        all_at(&mut queue, 0, now, OVERDUE);
    }
    assert_eq!(queue.stats().stalls, 0);
}

#[test]
fn an_inspector_with_a_full_ring_stalls() {
    let mut queue =
        queue(Policy { stall: 300, overload: Overload::DropNewest, ..POLICY }, [room(2), room(99)]);
    let hash = (0..).find(|hash| offer_at(&mut queue, 0, *hash) == Some(0)).unwrap();
    assert_eq!(offer_at(&mut queue, 0, hash), Some(0));
    all_at(&mut queue, 1, 1, PASS);
    all_at(&mut queue, 0, 100, OVERDUE);
    // No further frame can become overdue.
    assert_eq!(offer_at(&mut queue, 200, hash), None);
    poll_at(&mut queue, 299);
    assert_eq!(offer_at(&mut queue, 300, hash), None);
    poll_at(&mut queue, 300);
    assert_eq!(offer_at(&mut queue, 301, hash), Some(1));
}

#[test]
fn a_stalled_inspector_gets_a_copy_in_each_period() {
    let mut queue = queue(Policy { stall: 300, ..POLICY }, [room(999)]);
    for now in [0, 100, 200] {
        assert_eq!(offer_at(&mut queue, now, 7), Some(0));
        all_at(&mut queue, 0, now + 100, OVERDUE);
    }
    // Packets do not wait for it: the default at once.
    for now in 301..600 {
        assert_eq!(offer(&mut queue, Some(ids(1)[0])), Enqueue::Lost(Some(DropReason::NoInspector)), "{now}");
    }
    assert_eq!((queue.stats().probes, queue.stats().no_inspector), (0, 299));
    for now in [600, 601, 700, 1200] {
        assert_eq!(offer_at(&mut queue, now, 7), None, "{now}");
    }
    // The first copy has not returned.
    assert_eq!((queue.stats().probes, queue.open()), (1, 1));
    all_at(&mut queue, 0, 1300, OVERDUE);
    assert_eq!((offer_at(&mut queue, 1301, 7), queue.stats().probes), (None, 2));
    all_at(&mut queue, 0, 1302, PASS);
    assert_eq!((offer_at(&mut queue, 1303, 7), stalled(&mut queue)), (Some(0), 0));
}

#[test]
fn an_inspector_on_standby_takes_over_flows() {
    for dies in [true, false] {
        let mut queue = queue(Policy { stall: 200, ..POLICY }, [room(999), room(999)]);
        queue.join_standby(3, room(999));
        let before: Vec<_> = (0..64).map(|hash| offer_at(&mut queue, 0, hash).unwrap()).collect();
        assert!(before.contains(&0) && before.contains(&1) && !before.contains(&2));
        all_at(&mut queue, 1, 50, PASS);
        match dies {
            true => fake(&mut queue, 0).dead = true,
            false => {
                all_at(&mut queue, 0, 100, OVERDUE);
                let hash = before.iter().position(|index| *index == 0).unwrap();
                assert_eq!(offer_at(&mut queue, 100, hash as u32), Some(0));
                all_at(&mut queue, 0, 200, OVERDUE);
            }
        }
        let after: Vec<_> = (0..64).map(|hash| offer_at(&mut queue, 300, hash).unwrap()).collect();
        let expected: Vec<_> = before.iter().map(|index| if *index == 0 { 2 } else { *index }).collect();
        assert_eq!(after, expected, "only its flows move");
        assert_eq!(queue.snapshot(&Shares::new(Limits::default(), true)).stats.takeovers, 1);
    }
}

/// Idle inspectors cost neither a doorbell nor a poll.
#[test]
fn only_inspectors_with_frames_are_woken_and_polled() {
    let fakes = [(); 24].map(|()| room(999));
    let mut queue = queue(POLICY, fakes);
    for turn in 0..100 {
        queue.begin_turn();
        assert!(offer_at(&mut queue, turn, 7).is_some());
        queue.announce();
        let busy = queue.inspectors().position(|slot| slot.open() > 0).unwrap();
        assert!(queue.arm());
        queue.disarm_ready(&mut std::iter::empty());
        all_at(&mut queue, busy, turn, PASS);
        queue.announce();
        let counts = |count: fn(&Fake) -> u32, queue: &mut Queue<Fake>| -> Vec<u32> {
            let all = queue.inspectors().map(|slot| count(slot.channel())).collect::<Vec<_>>();
            all.iter().enumerate().filter(|(at, _)| *at != busy).map(|(_, count)| *count).collect()
        };
        assert_eq!(counts(|fake| fake.kicks, &mut queue), [0; 23]);
        assert_eq!(counts(|fake| fake.arms, &mut queue), [0; 23]);
        // Once, to find its end.
        assert!(counts(|fake| fake.polls, &mut queue).iter().all(|polls| *polls <= 1));
        assert_eq!(fake(&mut queue, busy).kicks, turn as u32 + 1);
    }
}
