//! Packets of one flow that pass several inspectors.

use proptest::prelude::*;

use super::*;

/// A bridge whose queues 1, 2, ... have one inspector each.
struct Chain {
    world: World,
    inspectors: Vec<Inspector>,
}

impl Chain {
    /// `rooms`: how many undecided frames each inspector takes. 0: no limit.
    fn new(rules: &str, rooms: &[usize]) -> Self {
        let queues = (1..).zip(rooms).map(|(number, _)| Queue::new(number, Policy::default())).collect();
        let (mut world, _) = World::with_queues(rules, queues, Inside::default());
        let mut inspectors = Vec::new();
        for (number, &room) in (1..).zip(rooms) {
            let inspector = Inspector(Rc::new(RefCell::new(Inside { room, ..Inside::default() })));
            world.engine.join(number, u32::from(number), inspector.clone()).unwrap();
            inspectors.push(inspector);
        }
        Self { world, inspectors }
    }

    fn idle(&mut self) {
        let Ok(()) = self.world.engine.idle();
    }

    /// The number of undecided frames at each inspector.
    fn held(&self) -> Vec<u32> {
        let held = |inspector: &Inspector| {
            let inside = inspector.0.borrow();
            inside.published - inside.decided
        };
        self.inspectors.iter().map(held).collect()
    }

    /// The inspector of queue `number` passes the frames that it has.
    fn pass(&mut self, number: usize) {
        self.inspectors[number - 1].decide();
        self.idle();
    }
}

/// Packets of one flow. The last byte of each is its number.
fn flow(words: &str, count: u8) -> Vec<Vec<u8>> {
    let numbered = |number| {
        let mut frame = packet(words);
        *frame.last_mut().unwrap() = number;
        frame
    };
    (0..count).map(numbered).collect()
}

fn borrowed(frames: &[Vec<u8>]) -> Vec<&[u8]> {
    frames.iter().map(Vec::as_slice).collect()
}

fn labels(frames: &[Vec<u8>]) -> Vec<u8> {
    frames.iter().map(|frame| *frame.last().unwrap()).collect()
}

/// Rules that create no state for these packets after an inspector.
#[test]
fn each_inspector_of_a_chain_holds_as_many_packets_of_a_flow_as_it_takes() {
    let rules = [
        "add divert 1 ip from any to any\nadd divert 2 ip from any to any\nadd inspect 3 ip from any to any\n",
        "add allow udp from any to any 53 keep-state\nadd divert 1 ip from any to any\n\
         add divert 2 ip from any to any\nadd inspect 3 ip from any to any\n",
        "add divert 1 ip from any to any\nadd divert 2 ip from any to any\n\
         add allow tcp from any to any setup keep-state\nadd divert 3 ip from any to any\nadd allow ip from any to any\n",
    ];
    for rules in rules {
        let mut chain = Chain::new(rules, &[0, 16, 4]);
        let frames = flow("udp 10.0.0.1:4000 > 10.0.0.2:5000 len 9", 40);
        chain.world.burst(&borrowed(&frames));
        assert_eq!(chain.held(), [40, 0, 0], "{rules}");
        chain.pass(1);
        assert_eq!(chain.held(), [0, 16, 0], "{rules}");
        chain.pass(2);
        chain.idle();
        assert_eq!(chain.held(), [0, 16, 4], "{rules}");
        while chain.held() != [0; 3] {
            chain.pass(3);
            chain.pass(2);
        }
        assert_eq!(labels(&chain.world.engine.io.0), labels(&frames), "{rules}");
        assert_eq!(chain.world.counts(), [40, 40, 0, 0]);
        chain.world.assert_clear();
    }
}

#[test]
fn packets_wait_for_a_state_that_an_earlier_packet_may_create_and_for_nothing_else() {
    let frames = flow("udp 10.0.0.1:4000 > 10.0.0.2:53 len 9", 20);
    // The state is created behind both inspectors.
    let mut chain = Chain::new(
        "add check-state\nadd divert 1 udp from any to any\nadd divert 2 udp from any to any\n\
         add allow udp from any to any 53 keep-state\n",
        &[0, 0],
    );
    chain.world.burst(&borrowed(&frames));
    assert_eq!(chain.held(), [1, 0]);
    chain.pass(1);
    assert_eq!(chain.held(), [0, 1]);
    chain.pass(2);
    // The others have the state.
    assert_eq!(chain.held(), [0, 0]);
    assert_eq!(labels(&chain.world.engine.io.0), labels(&frames));
    chain.world.assert_clear();

    // The state is created on the way to the second inspector, which still has the first packet when the others continue.
    let mut chain = Chain::new(
        "add divert 1 udp from any to any\nadd inspect 2 udp from any to any 53 keep-state\n",
        &[0, 0],
    );
    chain.world.burst(&borrowed(&frames));
    assert_eq!(chain.held(), [1, 0]);
    chain.pass(1);
    assert_eq!(chain.held(), [19, 1]);
    chain.pass(1);
    assert_eq!(chain.held(), [0, 20]);
    // With a state, packets no longer wait for each other.
    chain.world.burst(&borrowed(&frames));
    assert_eq!(chain.held(), [20, 20]);
    assert!(chain.world.engine.io.0.is_empty());
    chain.pass(1);
    chain.pass(2);
    assert_eq!(labels(&chain.world.engine.io.0), [labels(&frames), labels(&frames)].concat());
    chain.world.assert_clear();
}

#[test]
fn deferred_packets_are_dropped_at_a_stop() {
    let mut chain =
        Chain::new("add divert 1 udp from any to any\nadd allow udp from any to any 53 keep-state\n", &[0]);
    chain.world.burst(&borrowed(&flow("udp 10.0.0.1:4000 > 10.0.0.2:53 len 9", 5)));
    assert_eq!(chain.held(), [1]);
    assert_eq!(chain.world.engine.abandon(), Ok(5));
    assert_eq!(chain.world.counts(), [5, 0, 5, 0]);
    chain.world.assert_clear();
}

/// Rules under which a packet's outcome depends on the packets before it.
const STATEFUL: [&str; 3] = [
    // A reply passes only by the state of the request.
    "add check-state\nadd divert 1 udp from any to any\nadd divert 2 udp from any to any\n\
     add allow udp from any to any 53 keep-state\nadd deny ip from any to any\n",
    "add divert 1 udp from any to any\nadd check-state\nadd inspect 2 udp from any to any 53 keep-state\n\
     add deny ip from any to any\n",
    "add check-state :a\nadd divert 1 udp from any to any\nadd count udp from any to any 53 keep-state :b\n\
     add divert 2 udp from any to any\nadd check-state :b\nadd deny ip from any to any\n",
];

/// The verdict of the inspector of a queue follows from the packet: one in five is dropped.
fn verdict(queue: usize, label: u8) -> Decision<'static> {
    match (usize::from(label) * 7 + queue * 3) % 5 {
        0 => Verdict::Drop.into(),
        _ => Verdict::Pass.into(),
    }
}

/// Processes `frames` and returns the labels of the packets that leave. `choices` says when packets arrive, and when inspectors decide
/// which of their packets; without it, each packet arrives when the one before it is decided.
fn outcomes(rules: &str, frames: &[Vec<u8>], choices: Option<&[u8]>) -> Vec<u8> {
    let serial = choices.is_none();
    let mut choices = choices.unwrap_or_default().iter();
    let mut below = |bound: usize| choices.next().map_or(0, |choice| usize::from(*choice) % bound);
    let mut chain = Chain::new(rules, &[0, 3]);
    let mut open = [(); 2].map(|()| Vec::new());
    let mut announced = [0; 2];
    let mut arrivals = frames.iter().peekable();
    while arrivals.peek().is_some() || chain.world.engine.totals().held() > 0 {
        let arrives = if serial { chain.world.engine.totals().held() == 0 } else { below(3) != 1 };
        if let Some(frame) = arrivals.next_if(|_| arrives) {
            chain.world.burst(&[frame]);
        }
        for (queue, inspector) in chain.inspectors.iter().enumerate() {
            let mut inside = inspector.0.borrow_mut();
            let open: &mut Vec<u32> = &mut open[queue];
            open.extend(announced[queue]..inside.announced);
            announced[queue] = inside.announced;
            while !open.is_empty() && below(2) == 0 {
                let seq = open.swap_remove(below(open.len()));
                let decision = verdict(queue, inside.labels[seq as usize]);
                inside.verdicts.push((seq, decision));
                inside.decided += 1;
            }
        }
        chain.idle();
    }
    chain.world.assert_clear();
    labels(&chain.world.engine.io.0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Inspectors decide in any order and at any time. Each packet has the outcome that it has when the packets are processed one
    /// after the other, and the packets of a flow leave in the order of their arrival.
    #[test]
    fn outcomes_do_not_depend_on_when_inspectors_decide(
        rules in 0..STATEFUL.len(),
        packets in prop::collection::vec((0..3_usize, any::<bool>()), 1..60),
        choices in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let numbered = |(number, (flow, request)): (usize, &(usize, bool))| {
            let mut frame = packet(&match request {
                true => format!("udp 10.0.0.1:400{flow} > 10.0.0.2:53 len 9"),
                false => format!("udp 10.0.0.2:53 > 10.0.0.1:400{flow} len 9"),
            });
            *frame.last_mut().unwrap() = number as u8;
            frame
        };
        let frames: Vec<_> = packets.iter().enumerate().map(numbered).collect();
        let by_flow = |left: Vec<u8>| {
            let of_flow = |flow| left.iter().copied().filter(|at| packets[usize::from(*at)].0 == flow).collect();
            [0, 1, 2].map(|flow| -> Vec<u8> { of_flow(flow) })
        };
        let any_order = outcomes(STATEFUL[rules], &frames, Some(&choices));
        prop_assert_eq!(by_flow(any_order), by_flow(outcomes(STATEFUL[rules], &frames, None)));
    }
}
