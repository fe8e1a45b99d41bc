//! Operations on states besides packets: keepalives, the first SYN, events, top talkers.

use std::time::Duration;

use towpath_gate::state::{
    Ends, EventKind, Flow, Install, JournalRead, JournalReader, Keepalive, Lookup, Name, Refused, RuleId,
    Segment, Settings, StateEvent, States, Top,
};
use towpath_wire::{self as wire, LinkType, Time};

const START: Time = Time::from_secs(1_000);
const TCP: u8 = 6;
const UDP: u8 = 17;

fn flow(n: u8, proto: u8) -> Flow {
    let ends = Ends::V4([10, 0, 0, n].into(), [192, 0, 2, 1].into());
    Flow { ends, proto, src_port: 4000, dst_port: 80, zone: 0 }
}

fn flow6(n: u16) -> Flow {
    let src = [0x2001, 0xdb8, 0, 0, 0, 0, 0, n].into();
    Flow { ends: Ends::V6(src, "2001:db8::ffff".parse().unwrap(), 0), ..flow(0, TCP) }
}

fn segment(tcp_flags: u8, tcp_ack: u32) -> Segment {
    Segment { tcp_flags, tcp_ack, bytes: 100, ..Segment::default() }
}

fn install(states: &mut States, flow: &Flow, segment: &Segment, now: Time) -> Result<(), Refused> {
    states.install(flow, Name::DEFAULT, segment, RuleId(1), &Install::default(), now).map(drop)
}

fn hit(states: &mut States, flow: &Flow, segment: &Segment, now: Time) -> bool {
    states.lookup(flow, Lookup::Any, segment, now).is_some()
}

fn after(seconds: u64) -> Time {
    START + Duration::from_secs(seconds)
}

/// A connection whose two sides have acknowledged 500 and 900; the reverse side's acknowledgement came last.
fn connect(states: &mut States, flow: &Flow, now: Time) {
    install(states, flow, &segment(0x02, 0), now).unwrap();
    assert!(hit(states, &flow.reversed(), &segment(0x12, 500), now));
    assert!(hit(states, flow, &segment(0x10, 900), now));
    assert!(hit(states, &flow.reversed(), &segment(0x10, 500), now));
}

fn keepalives(states: &mut States, now: Time) -> Vec<Keepalive> {
    let mut all = Vec::new();
    // With a small budget: several calls complete a scan.
    (0..3000).for_each(|_| states.keepalives(now, 3, |keepalive| all.push(keepalive)));
    all
}

#[test]
fn keepalives_go_to_idle_established_connections() {
    for flow in [flow(1, TCP), flow6(1)] {
        let mut states = States::new(Settings::default(), 1);
        connect(&mut states, &flow, START);
        // An opening connection, one that was reset, and a UDP flow.
        install(&mut states, &self::flow(2, TCP), &segment(0x02, 0), START).unwrap();
        connect(&mut states, &self::flow(3, TCP), START);
        let reset = Segment { tcp_seq: 500, ..segment(0x14, 900) };
        assert!(hit(&mut states, &self::flow(3, TCP), &reset, START));
        install(&mut states, &self::flow(4, UDP), &segment(0, 0), START).unwrap();
        assert_eq!(keepalives(&mut states, START), []);
        assert_eq!(keepalives(&mut states, after(270)), [], "more than 20 s left");
        // Toward both sides, also the one whose acknowledgement was accepted last.
        let asked = keepalives(&mut states, after(285));
        let [to_client, to_server] =
            [Keepalive { flow: flow.reversed(), seq: 899, ack: 500 }, Keepalive { flow, seq: 499, ack: 900 }];
        assert_eq!(asked, [to_client, to_server]);
        assert_eq!(keepalives(&mut states, after(289)), [], "once in 5 s");
        // Only the server answers. The state expires at its time, but both ends are probed until then.
        assert!(hit(&mut states, &flow.reversed(), &segment(0x10, 500), after(290)));
        assert_eq!(keepalives(&mut states, after(290)), asked);
        // The client answers too, and the state lives on.
        assert!(hit(&mut states, &flow, &segment(0x10, 900), after(291)));
        assert_eq!(keepalives(&mut states, after(296)), []);
        assert!(hit(&mut states, &flow, &segment(0x10, 900), after(580)));
    }
}

#[test]
fn no_keepalives_without_the_setting() {
    let mut states = States::new(Settings { dyn_keepalive: false, ..Settings::default() }, 1);
    connect(&mut states, &flow(1, TCP), START);
    assert_eq!(keepalives(&mut states, after(290)), []);
}

#[test]
fn a_keepalive_is_a_segment_one_behind() {
    for flow in [flow(1, TCP), flow6(1)] {
        let mut frame = vec![7; 3];
        Keepalive { flow, seq: 0x0102_0304, ack: 0x0506_0708 }.write(&mut frame);
        let packet = wire::parse(LinkType::RAW, &frame, frame.len() as u32).unwrap();
        assert_eq!(packet.flow(), Some(flow));
        let fields =
            (packet.tcp_flags, packet.tcp_seq, packet.tcp_ack, packet.tcp_window, packet.tcp_data_len());
        assert_eq!(fields, (0x10, 0x0102_0304, 0x0506_0708, 0, Some(0)));
        let mut again = frame.clone();
        assert!(wire::checksum::fill(LinkType::RAW, &mut again, frame.len() as u32));
        assert_eq!(frame, again, "correct checksums");
    }
}

#[test]
fn the_first_syn_must_be_repeated() {
    let mut states = States::new(Settings { dyn_first_syn: true, ..Settings::default() }, 1);
    for flow in [flow(1, TCP), flow6(1)] {
        let syn = segment(0x02, 0);
        assert_eq!(install(&mut states, &flow, &syn, START), Err(Refused::FirstSyn));
        assert_eq!(install(&mut states, &flow, &syn, START), Err(Refused::FirstSyn), "repeated too soon");
        assert_eq!(install(&mut states, &flow, &syn, after(1)), Ok(()));
        assert_eq!(install(&mut states, &flow, &syn, after(1)), Ok(()), "the flow has a state");
    }
    // Other packets are not affected.
    assert_eq!(install(&mut states, &flow(2, UDP), &segment(0, 0), START), Ok(()));
    assert_eq!(install(&mut states, &flow(3, TCP), &segment(0x10, 7), START), Ok(()));
    assert_eq!((states.counters().first_syn, states.len()), (4, 4));
}

#[test]
fn removing_a_flow_removes_its_states_of_all_names() {
    for flow in [flow(1, TCP), flow6(1)] {
        let mut states = States::new(Settings::default(), 1);
        let limit = Install::default();
        for name in [Name::DEFAULT, Name(7.try_into().unwrap())] {
            states.install(&flow, name, &segment(0x02, 0), RuleId(1), &limit, START).unwrap();
        }
        let other = Flow { src_port: 4001, ..flow };
        install(&mut states, &other, &segment(0x02, 0), START).unwrap();
        assert_eq!(states.remove_flow(&flow.reversed(), after(1)), 2);
        assert_eq!((states.remove_flow(&flow, after(1)), states.len()), (0, 1));
        assert!(hit(&mut states, &other, &segment(0x10, 1), after(1)));
    }
}

/// All changes up to the end of the journal.
fn read(journal: &mut JournalReader) -> Vec<StateEvent> {
    let next = || match journal.read() {
        JournalRead::Change(event) => Some(event),
        JournalRead::End => None,
        JournalRead::Gap(changes) => panic!("{changes} changes are missing"),
    };
    std::iter::from_fn(next).collect()
}

fn kinds(events: Vec<StateEvent>) -> Vec<EventKind> {
    events.into_iter().map(|event| event.kind).collect()
}

#[test]
fn the_journal_has_the_changes_of_all_workers() {
    let settings = Settings { dyn_max: 10, dyn_evict: true, ..Settings::default() };
    let mut states = States::new(settings, 1);
    install(&mut states, &flow(100, UDP), &segment(0, 0), START).unwrap();
    let mut journal = states.journal();
    let mut other = states.worker().unwrap();
    install(&mut states, &flow(1, UDP), &segment(0, 0), after(1)).unwrap();
    install(&mut other, &flow(2, UDP), &segment(0, 0), after(2)).unwrap();
    states.expire_all(after(11));
    assert!(states.remove(&flow(2, UDP), Name::DEFAULT, after(11)));
    let events = read(&mut journal);
    let changes: Vec<_> =
        events.iter().map(|event| (event.kind, event.state().map(|state| state.flow))).collect();
    let rows = [
        (EventKind::Created, Some(flow(1, UDP))),
        (EventKind::Created, Some(flow(2, UDP))),
        (EventKind::Expired, Some(flow(100, UDP))),
        (EventKind::Expired, Some(flow(1, UDP))),
        (EventKind::Removed, Some(flow(2, UDP))),
    ];
    assert_eq!(changes, rows);
    assert_eq!(events[0].state().map(|state| state.bytes), Some([100, 0]));
    assert_eq!((events[0].id(), events[0].at), (events[3].id(), after(1)));
    assert_ne!(events[0].id(), events[1].id());
    // The ninth of ten states makes the table nearly full; the eleventh evicts one.
    let mut more = Vec::new();
    for n in 0..11 {
        other.idle();
        install(&mut states, &flow(n, UDP), &segment(0, 0), after(20)).unwrap();
        more.extend(kinds(read(&mut journal)).into_iter().filter(|kind| *kind != EventKind::Created));
    }
    assert_eq!(more, [EventKind::NearlyFull, EventKind::Evicted]);
    // A second reader has a cursor of its own.
    let mut second = states.journal();
    states.remove_where(|_| true);
    states.expire_all(after(20));
    let removed = read(&mut journal);
    assert_eq!(removed.len(), 11, "ten removals, and no longer nearly full");
    assert_eq!(read(&mut second), removed);
    drop((journal, second));
    install(&mut states, &flow(1, UDP), &segment(0, 0), after(30)).unwrap();
    assert_eq!(read(&mut states.journal()), []);
}

/// Packets that only refresh a state are not recorded; the phases of its connection are.
#[test]
fn the_journal_has_the_phases_of_a_connection() {
    for flow in [flow(1, TCP), flow6(1)] {
        let mut states = States::new(Settings::default(), 1);
        let mut journal = states.journal();
        let back = flow.reversed();
        install(&mut states, &flow, &segment(0x02, 0), START).unwrap();
        let rows = [
            (&back, 0x12, 101, Some(EventKind::Replied)),
            (&flow, 0x10, 201, Some(EventKind::Updated)),
            (&back, 0x10, 102, None),
            (&flow, 0x10, 202, None),
            (&flow, 0x11, 203, None),
            (&back, 0x11, 103, Some(EventKind::Updated)),
            // Another connection in the same state.
            (&flow, 0x02, 0, Some(EventKind::Updated)),
        ];
        assert_eq!(kinds(read(&mut journal)), [EventKind::Created]);
        for (flow, flags, ack, kind) in rows {
            assert!(hit(&mut states, flow, &segment(flags, ack), after(1)));
            let events = read(&mut journal);
            // The state in the journal is the state as it is listed.
            if let Some(event) = events.first() {
                assert_eq!(event.state(), states.list(after(1)).next().as_ref());
            }
            assert_eq!(kinds(events), Vec::from_iter(kind), "{flags:#x} {ack}");
        }
    }
}

#[test]
fn top_talkers_by_packets_and_by_bytes() {
    let mut states = States::new(Settings::default(), 1);
    for n in 1..=200_u8 {
        let packet = Segment { bytes: 10_000 / u32::from(n), ..Segment::default() };
        for _ in 0..n {
            install(&mut states, &flow(n, UDP), &packet, START).unwrap();
        }
    }
    let sources = |top: Vec<towpath_gate::state::Listed>| -> Vec<Flow> {
        top.into_iter().map(|state| state.flow).collect()
    };
    assert_eq!(sources(states.top(3, Top::Packets, START)), [200, 199, 198].map(|n| flow(n, UDP)));
    let by_bytes = states.top(200, Top::Bytes, START);
    assert!(by_bytes.is_sorted_by_key(|state| std::cmp::Reverse(state.bytes[0])) && by_bytes.len() == 200);
    assert_eq!(states.top(0, Top::Bytes, START), []);
}
