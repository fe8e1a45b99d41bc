//! Tests of the choice of listeners and of the policies.

use proptest::prelude::*;

use super::*;

/// Largest message of a test listener.
const LARGEST: usize = 3;

/// A listener with space for `room` frames.
#[derive(Debug, Default)]
struct Double {
    room: usize,
    out: Vec<u8>,
    lost: u64,
    last: Option<Loss>,
    dead: bool,
    /// Ends, as by another thread, when it gets a frame.
    ends: bool,
    stalled: bool,
    refused: u32,
    next: u32,
}

impl Listener for Double {
    fn send(&mut self, bytes: &[u8], _: &Meta) -> Result<Seq, ReserveError> {
        if bytes.len() > LARGEST {
            return Err(ReserveError::TooLarge);
        }
        self.dead |= self.ends;
        if self.dead {
            return Err(ReserveError::Disconnected);
        }
        if self.out.len() == self.room {
            return Err(ReserveError::RingFull);
        }
        self.out.push(bytes[0]);
        self.next += 1;
        Ok(Seq(self.next))
    }

    fn depth(&self) -> u32 {
        self.out.len() as u32
    }

    fn lose(&mut self, loss: Loss) {
        self.lost += 1;
        self.last = Some(loss);
    }

    fn is_dead(&self) -> bool {
        self.dead
    }

    fn is_stalled(&self) -> bool {
        self.stalled
    }

    fn refused(&mut self) {
        self.refused += 1;
    }
}

fn queue(policy: Policy, listeners: usize, room: usize) -> Queue<Double> {
    let mut queue = Queue::new(policy);
    for _ in 0..listeners {
        queue.join(Double { room, ..Double::default() });
    }
    queue
}

fn with(fanout: Fanout, overload: Overload) -> Policy {
    Policy { fanout, overload, ..Policy::default() }
}

fn hash(hash: u32) -> Meta {
    Meta { hash, ..Meta::default() }
}

#[test]
fn each_overload_policy_with_room_for_two_frames() {
    // Policy, result for the third frame, losses reported after the fourth, frames after space for one more.
    for (overload, third, told, out) in [
        (Overload::Block, Enqueue::Blocked, (0, None), vec![1, 2, 5]),
        (Overload::DropNewest, Enqueue::Lost, (2, Some(Loss::NoRoom)), vec![1, 2, 5]),
        (Overload::DropOldest(1), Enqueue::Backlogged, (1, Some(Loss::Oldest)), vec![1, 2, 4]),
        (Overload::DropOldest(0), Enqueue::Lost, (2, Some(Loss::NoRoom)), vec![1, 2, 5]),
        (Overload::Pass, Enqueue::Verdict(Verdict::Pass), (2, Some(Loss::Passed)), vec![1, 2, 5]),
        (Overload::Drop, Enqueue::Verdict(Verdict::Drop), (2, Some(Loss::Dropped)), vec![1, 2, 5]),
        (Overload::Queue(9), Enqueue::Verdict(Verdict::Queue(9)), (2, Some(Loss::HandedOn)), vec![1, 2, 5]),
    ] {
        let mut q = queue(with(Fanout::Exclusive, overload), 1, 2);
        for n in [1, 2] {
            assert!(matches!(q.enqueue(&[n], &hash(0), 0), Enqueue::Sent(0, _)));
        }
        assert_eq!(q.enqueue(&[3], &hash(0), 0), third, "{overload:?}");
        q.enqueue(&[4], &hash(0), 0);
        let listener = &mut q.members[0].listener;
        assert_eq!((listener.lost, listener.last), told, "{overload:?}");
        listener.room = 3;
        q.enqueue(&[5], &hash(0), 0);
        assert_eq!(q.members[0].listener.out, out, "{overload:?}");
    }
}

#[test]
fn a_frame_that_is_too_large_is_lost_and_blocks_nothing() {
    let all = [1; LARGEST + 1];
    for fanout in [Fanout::Exclusive, Fanout::Broadcast] {
        // Policy, result, loss reported to the listener.
        for (overload, fate, told) in [
            (Overload::Block, Enqueue::Lost, Loss::TooLarge),
            (Overload::DropNewest, Enqueue::Lost, Loss::TooLarge),
            (Overload::DropOldest(4), Enqueue::Lost, Loss::TooLarge),
            (Overload::Pass, Enqueue::Verdict(Verdict::Pass), Loss::Passed),
            (Overload::Drop, Enqueue::Verdict(Verdict::Drop), Loss::Dropped),
            (Overload::Queue(9), Enqueue::Verdict(Verdict::Queue(9)), Loss::HandedOn),
        ] {
            let told = if fanout == Fanout::Broadcast { Loss::TooLarge } else { told };
            let mut q = queue(with(fanout, overload), 1, 2);
            assert_eq!(q.enqueue(&all, &hash(0), 0), fate, "{overload:?}");
            let listener = &q.members[0].listener;
            assert_eq!((listener.lost, listener.last), (1, Some(told)), "{overload:?}");
            assert_eq!(q.stats().lost, u64::from(fate == Enqueue::Lost));
        }
    }
    // In the backlog, followed by another frame.
    let mut q = queue(with(Fanout::Exclusive, Overload::DropOldest(4)), 1, 1);
    assert!(matches!(q.enqueue(&[1], &hash(0), 0), Enqueue::Sent(0, _)));
    for bytes in [&[2][..], &all, &[3]] {
        assert_eq!(q.enqueue(bytes, &hash(0), 0), Enqueue::Backlogged);
    }
    q.members[0].listener.room = 9;
    q.flush();
    assert_eq!((q.members[0].listener.out.as_slice(), q.members[0].listener.lost), (&[1, 2, 3][..], 1));
    assert_eq!((q.stats().backlog, q.stats().lost, q.stats().sent), (0, 1, 3));
}

/// The listener of each flow.
fn owners(q: &mut Queue<Double>) -> Vec<usize> {
    let owner = |sent| match sent {
        Enqueue::Sent(index, _) => index,
        other => panic!("{other:?}"),
    };
    (0..64).map(|flow| owner(q.enqueue(&[1], &hash(flow), 0))).collect()
}

#[test]
fn a_standby_listener_takes_over_the_flows_of_one_that_ends_or_stalls() {
    let mut q = queue(with(Fanout::FlowHash, Overload::Block), 3, 9999);
    q.join_standby(Double { room: 9999, ..Double::default() });
    let mut expected = owners(&mut q);
    assert!((0..3).all(|index| expected.contains(&index)) && !expected.contains(&3));
    // The listener that ends or stalls, and its successor: the one on standby. Then another is on standby.
    for (index, successor, ends) in [(0, 3, true), (3, 4, false), (1, 5, true)] {
        let listener = &mut q.members[index].listener;
        (listener.dead, listener.stalled) = (ends, !ends);
        expected.iter_mut().filter(|owner| **owner == index).for_each(|owner| *owner = successor);
        assert_eq!(owners(&mut q), expected, "{index}");
        q.join_standby(Double { room: 9999, ..Double::default() });
    }
    assert_eq!(q.stats().takeovers, 3);
    // A new listener in use takes the place of one that has ended.
    let mut q = queue(with(Fanout::FlowHash, Overload::Block), 2, 9999);
    q.join_standby(Double::default());
    let mut expected = owners(&mut q);
    (q.members[0].listener.dead, q.members[2].listener.dead) = (true, true);
    q.join(Double { room: 9999, ..Double::default() });
    expected.iter_mut().filter(|owner| **owner == 0).for_each(|owner| *owner = 3);
    assert_eq!(owners(&mut q), expected);
}

#[test]
fn a_frame_goes_to_another_listener_if_its_listener_ends_after_the_choice() {
    let ending = || Double { room: 9, ends: true, ..Double::default() };
    let cases = [
        (Fanout::Exclusive, Enqueue::Sent(2, Seq(1))),
        (Fanout::FlowHash, Enqueue::Sent(2, Seq(1))),
        (Fanout::Cpu, Enqueue::Sent(2, Seq(1))),
        (Fanout::LeastLoaded, Enqueue::Sent(2, Seq(1))),
        (Fanout::Broadcast, Enqueue::SentTo(1)),
        (Fanout::Mirror, Enqueue::SentTo(1)),
    ];
    for (fanout, sent) in cases {
        // The last one is on standby, or in use.
        for standby in [true, false] {
            let mut q = Queue::new(with(fanout, Overload::DropNewest));
            q.join(ending());
            q.join(ending());
            let last = Double { room: 9, ..Double::default() };
            if standby {
                q.join_standby(last)
            } else {
                q.join(last)
            }
            assert_eq!(q.enqueue(&[1], &hash(0), 0), sent, "{fanout:?} {standby}");
            assert_eq!(
                (q.stats().sent, q.stats().lost, q.stats().copies_lost),
                (1, 0, 0),
                "{fanout:?} {standby}"
            );
        }
        let mut q = Queue::new(with(fanout, Overload::DropNewest));
        q.join(ending());
        assert_eq!(q.enqueue(&[1], &hash(0), 0), Enqueue::NoListener, "{fanout:?}");
        assert_eq!((q.stats().offered, q.stats().no_listener), (1, 1), "{fanout:?}");
    }
}

#[test]
fn a_stalled_listener_gets_frames_of_a_broadcast_only() {
    for (fanout, sent) in [
        (Fanout::Exclusive, Enqueue::NoListener),
        (Fanout::FlowHash, Enqueue::NoListener),
        (Fanout::Cpu, Enqueue::NoListener),
        (Fanout::LeastLoaded, Enqueue::NoListener),
        (Fanout::Broadcast, Enqueue::SentTo(1)),
        (Fanout::Mirror, Enqueue::SentTo(1)),
    ] {
        let mut q = queue(with(fanout, Overload::Block), 1, 9);
        q.members[0].listener.stalled = true;
        assert_eq!(q.enqueue(&[1], &hash(0), 0), sent, "{fanout:?}");
        q.join(Double { room: 1, ..Double::default() });
        if sent == Enqueue::NoListener {
            assert!(matches!(q.enqueue(&[1], &hash(0), 0), Enqueue::Sent(1, _)), "{fanout:?}");
            assert_eq!(q.enqueue(&[1], &hash(0), 0), Enqueue::Blocked);
            assert_eq!((q.members[0].listener.refused, q.members[1].listener.refused), (0, 1));
        }
    }
}

#[test]
fn the_marks_have_hysteresis() {
    let policy = Policy { high: 4, low: 1, ..with(Fanout::Exclusive, Overload::Drop) };
    let mut q = queue(policy, 1, 100);
    for n in 0..4 {
        assert!(matches!(q.enqueue(&[n], &hash(0), 0), Enqueue::Sent(..)));
    }
    for depth in [4, 3, 2] {
        q.members[0].listener.out.truncate(depth);
        assert_eq!(q.enqueue(&[9], &hash(0), 0), Enqueue::Verdict(Verdict::Drop), "at {depth}");
    }
    q.members[0].listener.out.truncate(1);
    assert!(matches!(q.enqueue(&[9], &hash(0), 0), Enqueue::Sent(..)));
    assert_eq!(q.stats().overloads, 1);
}

#[test]
fn a_flow_stays_with_its_listener_while_other_listeners_join_and_leave() {
    let mut q = queue(with(Fanout::FlowHash, Overload::Drop), 0, 0);
    // The value of `room` identifies a listener.
    let join = |q: &mut Queue<Double>, who| q.join(Double { room: 10_000 + who, ..Double::default() });
    let flows = |q: &mut Queue<Double>| {
        let mut at = |flow| match q.enqueue(&[0], &hash(flow), 0) {
            Enqueue::Sent(i, _) => q.members[i].listener.room - 10_000,
            other => panic!("{other:?}"),
        };
        (0..1000).map(|h| at(h * 7919)).collect::<Vec<_>>()
    };
    (0..4).for_each(|who| join(&mut q, who));
    let mut before = flows(&mut q);
    for who in 0..4 {
        let charge = before.iter().filter(|b| **b == who).count();
        assert!((150..350).contains(&charge), "listener {who} has {charge} of 1000 flows");
    }
    // Listener that leaves; whether it is removed at once; listener that joins.
    for (gone, taken, come) in [(1, false, None), (0, true, None), (3, true, Some(4)), (2, true, Some(5))] {
        for member in q.members.iter_mut().filter(|m| m.listener.room == 10_000 + gone) {
            member.listener.dead = true;
        }
        if taken {
            assert!(!q.take_dead().is_empty());
        }
        come.into_iter().for_each(|who| join(&mut q, who));
        let now = flows(&mut q);
        for (flow, (before, now)) in before.iter().zip(&now).enumerate() {
            assert_ne!(*now, gone);
            let may = before == now || *before == gone || Some(*now) == come;
            assert!(may, "flow {flow} moved from {before} to {now} when {gone} went");
        }
        before = now;
    }
}

#[test]
fn cpu_least_loaded_and_exclusive() {
    let mut q = queue(with(Fanout::Cpu, Overload::Drop), 3, 10);
    for cpu in 0..6 {
        assert!(matches!(q.enqueue(&[0], &hash(0), cpu), Enqueue::Sent(i, _) if i == cpu as usize % 3));
    }
    let mut q = queue(with(Fanout::LeastLoaded, Overload::Drop), 3, 10);
    for n in 0..9 {
        q.enqueue(&[n], &hash(0), 0);
    }
    assert!(q.listeners().all(|l| l.out.len() == 3));
    let mut q = queue(with(Fanout::Exclusive, Overload::Drop), 2, 10);
    q.members[0].listener.dead = true;
    assert!(matches!(q.enqueue(&[0], &hash(0), 0), Enqueue::Sent(1, _)));
    assert_eq!(q.take_dead().len(), 1);
    q.members[0].listener.dead = true;
    assert_eq!(q.enqueue(&[0], &hash(0), 0), Enqueue::NoListener);
}

#[test]
fn a_slow_mirror_listener_loses_only_its_own_copies() {
    let mut q = queue(with(Fanout::Mirror, Overload::Block), 2, 100);
    q.members[1].listener.room = 1;
    for n in 0..10 {
        assert!(matches!(q.enqueue(&[n], &hash(0), 0), Enqueue::SentTo(1 | 2)));
    }
    assert_eq!((q.members[0].listener.out.len(), q.members[0].listener.lost), (10, 0));
    assert_eq!((q.members[1].listener.out.len(), q.members[1].listener.lost), (1, 9));
    let mut q = queue(with(Fanout::Broadcast, Overload::Drop), 2, 1);
    assert_eq!(q.enqueue(&[1], &hash(0), 0), Enqueue::SentTo(2));
    assert_eq!(q.enqueue(&[2], &hash(0), 0), Enqueue::Verdict(Verdict::Drop));
}

fn overload() -> impl Strategy<Value = Overload> {
    prop_oneof![
        Just(Overload::Block),
        Just(Overload::DropNewest),
        (0..4usize).prop_map(Overload::DropOldest),
        Just(Overload::Pass),
        Just(Overload::Drop),
        Just(Overload::Queue(3)),
    ]
}

fn fanout() -> impl Strategy<Value = Fanout> {
    prop::sample::select(vec![
        Fanout::Exclusive,
        Fanout::FlowHash,
        Fanout::Cpu,
        Fanout::LeastLoaded,
        Fanout::Broadcast,
        Fanout::Mirror,
    ])
}

proptest! {
    #[test]
    fn every_frame_is_accounted_for(
        fanout in fanout(), overload in overload(), high in 1..6u32, low in 0..6u32,
        ops in prop::collection::vec((0..4usize, 0..6usize, any::<u32>()), 1..80),
    ) {
        let mut q = queue(Policy { fanout, overload, high, low }, 3, 4);
        for (who, what, hash) in ops {
            match what {
                0 => drop(q.members.get_mut(who).map(|m| m.listener.out.clear())),
                1 if hash % 8 == 0 => drop(q.members.get_mut(who).map(|m| m.listener.dead = true)),
                2 if hash % 4 == 0 => drop(q.take_dead()),
                _ => drop(q.enqueue(&[1; LARGEST + 1][..1 + hash as usize % (LARGEST + 1)], &Meta { hash, ..Meta::default() }, hash)),
            }
            let s = q.stats();
            prop_assert_eq!(s.offered, s.sent + s.blocked + s.lost + s.passed + s.dropped + s.handed_on
                + s.no_listener + s.backlog);
            if let Overload::DropOldest(max) = overload {
                prop_assert!(s.backlog <= max as u64);
            }
        }
    }
}
