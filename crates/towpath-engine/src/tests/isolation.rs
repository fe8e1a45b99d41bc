//! A hostile and an honest inspector: the hostile one takes only its share, and creates no queue.

use proptest::prelude::*;
use towpath_ring::Overload;

use super::*;
use crate::reorder::Limits;

const RULES: &str = "add inspect 1 udp from any to any 1\nadd inspect 2 udp from any to any 2\nadd allow ip from any to any\n";

/// Limits with a guarantee of 10 packets for each account of queues 1 and 2.
const LIMITS: Limits = Limits { packets: 160, bytes: 160 * MAX_FRAME };

static LONG: [u8; 256 << 10] = [7; 256 << 10];

/// A bridge with an inspector of queue 1, which may name queue 3, and one of queue 2.
fn world() -> (World, [Inspector; 2]) {
    let policy =
        || Policy { overload: Overload::DropNewest, default: DefaultVerdict::Pass, ..Policy::default() };
    let queues = vec![
        Queue::new(1, Policy { may_queue: vec![3], ..policy() }),
        Queue::new(2, policy()),
        Queue::new(3, policy()),
    ];
    let (mut world, _) = World::with_queues(RULES, queues, Inside::default());
    world.engine.set_reorder_limits(LIMITS);
    let inspectors = [1, 2].map(|number| {
        let inspector = Inspector::default();
        world.engine.join(number, number.into(), inspector.clone()).unwrap();
        inspector
    });
    (world, inspectors)
}

impl World {
    fn flow_to(&mut self, queue: u16, flow: u16) {
        let frame = packet(&format!("udp 10.0.0.1:{} > 10.0.0.2:{queue}", 1024 + flow));
        self.burst(&[&frame]);
    }

    fn queue_stats(&mut self, number: u16) -> crate::queue::Stats {
        let queues = self.engine.summary().queues;
        queues.iter().find(|queue| queue.number == number).expect("the queue").stats
    }

    fn assert_conserved(&mut self) {
        let waiting: u64 = self.engine.reorder.waiting() as u64;
        let totals = self.engine.totals();
        assert_eq!(totals.held(), waiting);
        for queue in self.engine.summary().queues {
            let stats = queue.stats;
            assert_eq!(
                stats.frames,
                stats.passed + stats.dropped + stats.replaced + stats.lost() + stats.open
            );
        }
    }
}

#[test]
fn a_verdict_names_only_the_queues_that_the_configuration_allows() {
    let rows = [
        // Queue, and whether it is allowed.
        (3, true),
        (2, false),
        (1, false),
        (9, false),
        (65_535, false),
        (0, false),
    ];
    for (number, allowed) in rows {
        for flow in [false, true] {
            let (mut world, [one, _]) = world();
            let before = world.engine.queues.len();
            let verdict = Decision { flow, ..Verdict::Queue(number).into() };
            world.flow_to(1, 1);
            one.decide_with(verdict);
            let Ok(()) = world.engine.idle();
            // A verdict for the flow decides the second packet of the flow.
            world.flow_to(1, 1);
            one.decide_with(verdict);
            let Ok(()) = world.engine.idle();
            let stats = world.queue_stats(1);
            let frames = if flow && allowed { 1 } else { 2 };
            let refused = if allowed { 0 } else { 2 };
            assert_eq!((stats.frames, stats.invalid_verdict), (frames, refused), "{number} {flow}");
            assert_eq!(world.engine.queues.get(0).flow_verdicts().len(), usize::from(flow && allowed));
            assert_eq!(world.queue_stats(3).no_inspector, if allowed { 2 } else { 0 }, "{number} {flow}");
            assert_eq!(world.engine.queues.len(), before, "no queue is created");
            assert_eq!(world.counts(), [2, 2, 0, 0], "the default is to pass");
            world.assert_clear();
        }
    }
}

#[test]
fn a_queue_that_is_no_longer_allowed_ends_the_verdicts_for_flows() {
    let (mut world, [one, _]) = world();
    world.flow_to(1, 1);
    one.decide_with(Decision { flow: true, ..Verdict::Queue(3).into() });
    let Ok(()) = world.engine.idle();
    world.flow_to(1, 1);
    assert_eq!((world.queue_stats(1).by_flow, world.queue_stats(3).frames), (1, 2));
    world.engine.set_queue(1, Policy::default());
    world.flow_to(1, 1);
    assert_eq!((world.queue_stats(1).frames, world.queue_stats(3).frames), (2, 2));
}

#[test]
fn a_replacement_that_no_port_can_carry_is_invalid() {
    for (len, fits) in [(MAX_FRAME, true), (MAX_FRAME + 1, false), (LONG.len(), false)] {
        let (mut world, [one, _]) = world();
        world.flow_to(1, 1);
        one.decide_with(Verdict::Replace(&LONG[..len]).into());
        let Ok(()) = world.engine.idle();
        let stats = world.queue_stats(1);
        assert_eq!((stats.replaced, stats.invalid_verdict), (u64::from(fits), u64::from(!fits)), "{len}");
        let slot =
            world.engine.queues.get_mut(0).inspectors().next().unwrap().snapshot(1, &Policy::default(), 0);
        assert_eq!(slot.verdicts.too_long, u64::from(!fits));
        // After an invalid verdict, the default is to pass the packet as it was.
        assert_eq!(world.counts(), [1, 1, 0, 0], "{len}");
        assert_eq!(world.engine.io.0[0].len() == len, fits);
    }
}

/// The inspector of queue 1 holds one packet of a flow and replaces the later ones by the longest frames. The one of queue 2 passes at
/// once.
#[test]
fn a_hostile_inspector_costs_only_its_own_queue() {
    let (mut world, [hostile, honest]) = world();
    world.flow_to(1, 1);
    hostile.0.borrow_mut().decided = 1;
    for _ in 0..400 {
        world.flow_to(1, 1);
        hostile.decide_with(Verdict::Replace(&LONG[..MAX_FRAME]).into());
        // Up to the guarantee of an inspector.
        for flow in 0..10 {
            world.flow_to(2, 500 + flow);
        }
        honest.decide();
        let Ok(()) = world.engine.idle();
        world.assert_conserved();
    }
    // It now holds every packet that it gets.
    for step in 0..400 {
        world.flow_to(1, 1000 + step);
        world.flow_to(2, 500 + step % 10);
        honest.decide();
        let Ok(()) = world.engine.idle();
        world.assert_conserved();
    }
    let (one, two) = (world.queue_stats(1), world.queue_stats(2));
    assert_eq!((two.frames, two.passed, two.lost(), two.no_room), (4400, 4400, 0, 0));
    assert!(one.replaced > 0 && one.queue_full > 0 && one.held > 10, "{one:?}");
    assert_eq!(two.held, 0);
    let left = world.engine.io.0.iter().filter(|frame| frame[36..38] == [0, 2]).count();
    assert_eq!(left, 4400, "every packet of the honest queue left");
}

/// The rest of the flow, which no rule sends to a queue, waits for the packet that an inspector holds, and is charged to the account of its queue.
#[test]
fn packets_behind_a_held_one_are_charged_to_its_queue() {
    let (mut world, [slow, honest]) = world();
    world.flow_to(1, 1);
    // The other direction of the flow: no rule inspects it.
    let back = packet("udp 10.0.0.2:1 > 10.0.0.1:1025");
    for _ in 0..LIMITS.packets {
        world.burst(&[&back]);
    }
    let one = world.queue_stats(1);
    assert!(one.held > 1 && one.no_room > 0, "{one:?}");
    for flow in 0..10 {
        world.flow_to(2, 500 + flow);
    }
    honest.decide();
    let Ok(()) = world.engine.idle();
    assert_eq!(world.queue_stats(2).passed, 10);
    slow.decide();
    let Ok(()) = world.engine.idle();
    assert_eq!(world.engine.totals().drops[DropReason::NoRoom], world.queue_stats(1).no_room);
    assert!(world.engine.is_drained());
    world.assert_clear();
}

#[derive(Clone, Debug)]
enum Op {
    /// A packet to a queue.
    Packet(u16, u16),
    /// An inspector decides all that it has.
    Decide(usize, u8),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (1u16..4, 0u16..64).prop_map(|(queue, flow)| Op::Packet(queue, flow)),
        1 => (0usize..2, any::<u8>()).prop_map(|(who, what)| Op::Decide(who, what)),
    ]
}

fn decision(what: u8) -> Decision<'static> {
    let verdict = match what % 8 {
        0 => Verdict::Pass,
        1 => Verdict::Drop,
        2 => Verdict::Replace(&LONG[..MAX_FRAME]),
        3 => Verdict::Replace(&LONG),
        4 => Verdict::Queue(3),
        5 => Verdict::Queue(what.into()),
        6 => Verdict::Repeat,
        _ => Verdict::Reject,
    };
    Decision { flow: what & 0x80 != 0, ..verdict.into() }
}

proptest! {
    /// Whatever inspectors decide: every packet has one outcome or waits, the buffer stays within its limits, and no queue is created.
    #[test]
    fn inspectors_cannot_break_the_accounts(ops in proptest::collection::vec(op(), 1..400)) {
        let (mut world, inspectors) = world();
        for op in ops {
            match op {
                Op::Packet(queue, flow) => world.flow_to(queue, flow),
                Op::Decide(who, what) => {
                    inspectors[who].decide_with(decision(what));
                    let Ok(()) = world.engine.idle();
                }
            }
            world.assert_conserved();
            let used = world.engine.reorder.shares().used();
            prop_assert!(used.packets <= LIMITS.packets && used.bytes <= LIMITS.bytes);
            prop_assert_eq!(world.engine.queues.len(), 3);
        }
        // `repeat` is bounded, so the packets end.
        for _ in 0..20 {
            inspectors.iter().for_each(|inspector| { inspector.decide(); });
            let Ok(()) = world.engine.idle();
        }
        prop_assert!(world.engine.is_drained());
        world.assert_clear();
        prop_assert_eq!(world.engine.reorder.shares().used().packets, 0);
    }
}
