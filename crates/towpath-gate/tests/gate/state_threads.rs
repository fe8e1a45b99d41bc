//! Several threads with the same states: invariants that hold for every interleaving.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread;

use towpath_gate::state::{
    Ends, Flow, Install, Installed, Kind, Limit, LimitMask, Lookup, Name, Refused, RuleId, Segment, Settings,
    States,
};
use towpath_wire::Time;

const THREADS: usize = 4;
const NOW: Time = Time::from_secs(1_000);
const PACKET: Segment = Segment {
    tcp_flags: 0,
    tcp_ack: 0,
    tcp_seq: 0,
    tcp_len: 0,
    tcp_fragment: false,
    tcp_window: 0,
    tcp_wscale: None,
    sctp_chunk: None,
    bytes: 100,
};

fn flow(n: u32) -> Flow {
    let ends = Ends::V4(Ipv4Addr::from(0x0a00_0000 + n), [192, 0, 2, 1].into());
    Flow { ends, proto: 17, src_port: 4000, dst_port: 53, zone: 0 }
}

fn flow6(n: u32) -> Flow {
    let src = (0x2001_0db8_u128 << 96 | u128::from(n)).into();
    Flow { ends: Ends::V6(src, "2001:db8::1:1".parse().unwrap(), 0), ..flow(0) }
}

fn install(states: &mut States, flow: &Flow, install: &Install, now: Time) -> Result<Installed, Refused> {
    states.install(flow, Name::DEFAULT, &PACKET, RuleId(1), install, now)
}

fn keep(states: &mut States, flow: &Flow) -> Result<Installed, Refused> {
    install(states, flow, &Install::default(), NOW)
}

/// Runs `work` on several threads, each with its number and its handle.
fn threads<T: Send>(states: &States, work: impl Fn(usize, &mut States) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let run = |n| {
            let (mut states, work) = (states.worker().unwrap(), &work);
            scope.spawn(move || work(n, &mut states))
        };
        let running: Vec<_> = (0..THREADS).map(run).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn threads_insert_each_flow_once() {
    for make in [flow, flow6] {
        let mut states = States::new(Settings::default(), 1);
        let new = threads(&states, |n, states| {
            // In both orders and directions, so that the threads meet.
            let flows = 0..5000_u32;
            let flow_of = |i| if n.is_multiple_of(2) { make(i) } else { make(4999 - i).reversed() };
            flows.filter(|&i| keep(states, &flow_of(i)) == Ok(Installed::New)).count()
        });
        assert_eq!(new.iter().sum::<usize>(), 5000);
        assert_eq!((states.len(), states.counters().created), (5000, 5000));
        let packets: u64 = states.list(NOW).map(|listed| listed.packets.iter().sum::<u64>()).sum();
        let bytes: u64 = states.list(NOW).map(|listed| listed.bytes.iter().sum::<u64>()).sum();
        assert_eq!((packets, bytes), (20_000, 2_000_000));
        states.expire_all(NOW + std::time::Duration::from_secs(100));
        assert!(states.is_empty());
    }
}

#[test]
fn limits_are_never_exceeded() {
    let states = States::new(Settings::default(), 1);
    let limit = Some(Limit::new(LimitMask::DST_ADDR, 100));
    let limited = Install { limit, ..Install::default() };
    let new = threads(&states, |n, states| {
        let flows = (0..1000).map(|i| flow(i * THREADS as u32 + n as u32));
        let made = |flow| install(states, &flow, &limited, NOW) == Ok(Installed::New);
        flows.map(made).filter(|&made| made).count()
    });
    assert_eq!(new.iter().sum::<usize>(), 100);
    assert_eq!(states.len(), 100);
    let parents: Vec<_> = states.list(NOW).map(|listed| listed.kind).collect();
    assert_eq!(parents.iter().find(|kind| **kind != Kind::Limit), Some(&Kind::Parent { count: 100 }));
}

#[test]
fn a_lost_race_to_insert_releases_its_reservation() {
    // Threads that lose the race to insert a state release what they had reserved.
    let states = States::new(Settings::default(), 1);
    let limit = Some(Limit::new(LimitMask::SRC_ADDR, THREADS as u32));
    let limited = Install { limit, ..Install::default() };
    threads(&states, |_, states| {
        (0..2000).for_each(|i| assert!(install(states, &flow(i), &limited, NOW).is_ok()));
    });
    assert_eq!(states.len(), 2000);
    let counts = states.list(NOW).filter_map(|listed| match listed.kind {
        Kind::Parent { count } => Some(count),
        _ => None,
    });
    assert!(counts.into_iter().all(|count| count == 1));
}

#[test]
fn no_packet_is_missing_in_the_counts() {
    let mut states = States::new(Settings::default(), 1);
    (0..64).for_each(|i| assert!(keep(&mut states, &flow(i)).is_ok()));
    let rounds = 3000;
    threads(&states, |n, states| {
        let packets: Vec<_> = (0..64)
            .map(|i| (if (i + n as u32).is_multiple_of(2) { flow(i) } else { flow(i).reversed() }, PACKET))
            .collect();
        let mut hits = vec![None; packets.len()];
        for round in 0..rounds {
            states.lookup_burst(
                packets.iter().copied().map(Some),
                Lookup::Any,
                NOW + std::time::Duration::from_nanos(round),
                &mut hits,
            );
            assert!(hits.iter().all(Option::is_some));
        }
        let flows: Vec<_> = packets.iter().map(|(flow, _)| *flow).collect();
        let mut peeked = vec![None; flows.len()];
        states.peek_burst(flows.iter().copied(), Lookup::Any, NOW, &mut peeked);
        assert_eq!(peeked, hits);
    });
    for listed in states.list(NOW) {
        let each = rounds * THREADS as u64 / 2;
        assert_eq!(listed.packets, [each + 1, each]);
        assert_eq!(listed.bytes, [100 * (each + 1), 100 * each]);
    }
    assert_eq!(states.counters().unreplied, 0);
}

#[test]
fn dyn_max_is_never_exceeded() {
    for dyn_evict in [false, true] {
        let settings = Settings { dyn_max: 500, dyn_evict, ..Settings::default() };
        let mut states = States::new(settings, 1);
        let most = AtomicUsize::new(0);
        let new = threads(&states, |n, states| {
            let mut new = 0;
            for i in 0..5000 {
                let make = if i % 2 == 0 { flow } else { flow6 };
                new += u64::from(keep(states, &make(i * THREADS as u32 + n as u32)) == Ok(Installed::New));
                most.fetch_max(states.len(), Ordering::Relaxed);
                if i % 32 == 0 {
                    states.expire(NOW, 10);
                }
            }
            new
        });
        assert!(most.into_inner() <= 500 && states.counters().peak <= 500);
        let counters = states.counters();
        assert_eq!(
            (counters.created, counters.evicted),
            (new.iter().sum(), counters.created - states.len() as u64)
        );
        assert_eq!(counters.evicted > 0, dyn_evict);
        // No slot was lost.
        let later = NOW + std::time::Duration::from_secs(60);
        states.expire_all(later);
        assert!(states.is_empty());
        for i in 0..500 {
            assert_eq!(install(&mut states, &flow(i), &Install::default(), later), Ok(Installed::New), "{i}");
        }
        assert_eq!(states.len(), 500);
    }
}

#[test]
fn a_stalled_worker_holds_slots_and_no_more_memory() {
    let mut states = States::new(Settings { dyn_max: 1000, ..Settings::default() }, 1);
    let mut still = states.worker().unwrap();
    let mut now = NOW;
    let mut round = |states: &mut States| {
        now = now + std::time::Duration::from_secs(20);
        states.expire_all(now);
        (0..400).filter(|&i| install(states, &flow(i), &Install::default(), now).is_ok()).count()
    };
    // To the other workers, this looks like a call that does not return.
    still.expire(NOW, 1);
    let made: Vec<_> = (0..5).map(|_| round(&mut states)).collect();
    assert_eq!(made, [400, 400, 200, 0, 0]);
    still.idle();
    assert_eq!(round(&mut states), 400);
    // The handle is used again.
    assert!(
        still.lookup(&flow(1), Lookup::Any, &PACKET, NOW + std::time::Duration::from_secs(121)).is_some()
    );
    drop(still);
    assert_eq!(round(&mut states), 400);
}

#[test]
fn workers_that_are_dropped_leave_their_slots() {
    let mut states = States::new(Settings { dyn_max: 100, ..Settings::default() }, 1);
    let mut now = NOW;
    for _ in 0..10 {
        let mut other = states.worker().unwrap();
        (0..100).for_each(|i| assert!(install(&mut other, &flow(i), &Install::default(), now).is_ok()));
        now = now + std::time::Duration::from_secs(20);
        // The slots wait for `states`, which is called again only after the other worker is gone.
        states.expire(now, 0);
        other.expire_all(now);
        drop(other);
        assert_eq!(install(&mut states, &flow(7), &Install::default(), now), Ok(Installed::New));
        now = now + std::time::Duration::from_secs(20);
        states.expire_all(now);
    }
}

#[test]
fn states_are_found_while_the_table_grows() {
    let states = States::new(Settings::default(), 1);
    let made = AtomicU32::new(0);
    let count = 60_000;
    threads(&states, |n, states| {
        if n == 0 {
            let new = (0..count).filter(|&i| {
                let new = keep(states, &flow(i)) == Ok(Installed::New);
                made.store(i + 1, Ordering::Release);
                new
            });
            assert_eq!(new.count(), count as usize);
            return;
        }
        let mut random = n as u32;
        loop {
            let there = made.load(Ordering::Acquire);
            if there == count {
                return;
            }
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            if let Some(i) = (random >> 8).checked_rem(there) {
                assert!(states.lookup(&flow(i), Lookup::Any, &PACKET, NOW).is_some(), "{i} of {there}");
            }
            if n == 1 {
                states.expire(NOW, 4);
            }
            if n == 2 && random.is_multiple_of(64) {
                states.prepare();
            }
        }
    });
    assert_eq!(states.len(), count as usize);
}

#[test]
fn a_connection_closed_by_both_sides_at_once_is_closed() {
    let tcp = |flags| Segment { tcp_flags: flags, tcp_ack: 1, ..PACKET };
    let tcp_flow = |i| Flow { proto: 6, ..flow(i) };
    let mut states = States::new(Settings::default(), 1);
    for i in 0..2000 {
        let flow = tcp_flow(i);
        let (rule, how) = (RuleId(1), Install::default());
        states.install(&flow, Name::DEFAULT, &tcp(0x02), rule, &how, NOW).unwrap();
        states.lookup(&flow.reversed(), Lookup::Any, &tcp(0x12), NOW).unwrap();
    }
    threads(&states, |n, states| {
        for i in 0..2000 {
            let flow = if n.is_multiple_of(2) { tcp_flow(i) } else { tcp_flow(i).reversed() };
            // After both FINs the state has one second to live; the time stands still here.
            assert!(states.lookup(&flow, Lookup::Any, &tcp(0x11), NOW).is_some());
        }
    });
    assert_eq!(states.len(), 2000);
    assert!(states.list(NOW).all(|listed| listed.tcp_seen & 0x303 == 0x303 && listed.seconds() == 1));
}

#[test]
fn rules_are_deleted_under_traffic() {
    let mut states = States::new(Settings::default(), 1);
    let removed = threads(&states, |n, states| {
        let mut removed = 0;
        for i in 0..4000_u32 {
            let rule = RuleId(1 + (i / 100) % 4);
            let _ = states.install(&flow(i % 700), Name::DEFAULT, &PACKET, rule, &Install::default(), NOW);
            if n == 0 && i % 50 == 0 {
                removed += states.remove_where(|gone| gone == rule);
            }
        }
        removed
    });
    states.expire_all(NOW);
    let counters = states.counters();
    // The number removed may include a state that a thread was about to insert and did not.
    assert!(counters.removed > 0 && counters.removed <= removed.iter().sum::<usize>() as u64);
    assert_eq!(counters.created, counters.removed + states.len() as u64);
    let by_rule: usize = (0..9).map(|rule| states.count_of(RuleId(rule))).sum();
    assert_eq!((by_rule, states.list(NOW).count()), (states.len(), states.len()));
}

/// Growth, eviction, limits, deleted rules, changed settings, listings, and handles that go idle, all at once.
#[test]
fn counters_add_up_under_all_operations_at_once() {
    const MOST: u32 = 3_000;
    let settings = Settings { dyn_max: MOST, dyn_evict: true, dyn_source_max: 3, ..Settings::default() };
    let mut states = States::new(settings.clone(), 1);
    threads(&states, |n, states| {
        let mut random = n as u32 + 1;
        for i in 0..12_000_u32 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (what, of) = (random >> 8 & 0xff, (random >> 16) % 9_000);
            let flow = if of % 3 == 0 { flow6(of) } else { flow(of) };
            let rule = RuleId(1 + of % 5);
            let now = NOW + std::time::Duration::from_millis((i / 4).into());
            match what {
                0..140 => {
                    let limit = (what < 20).then(|| Limit::new(LimitMask::SRC_ADDR, 2));
                    let how = Install { limit, ..Install::default() };
                    let _ = states.install(&flow, Name::DEFAULT, &PACKET, rule, &how, now);
                }
                140..230 => {
                    let hits = [
                        states.peek(&flow, Lookup::Any, now),
                        states.lookup(&flow.reversed(), Lookup::Any, &PACKET, now),
                    ];
                    // A state of this flow is always of the rule that installs it.
                    assert!(hits.iter().flatten().all(|hit| hit.rule == rule));
                }
                230..245 => {
                    let mut hits = [None; 8];
                    let packets = (of..of + 8).map(|n| Some((self::flow(n), PACKET)));
                    states.lookup_burst(packets, Lookup::Any, now, &mut hits);
                }
                245..252 => states.expire(now, 64),
                252 if n == 0 && i % 7 == 0 => _ = states.remove_where(|gone| gone == rule),
                252 => _ = states.remove_flow(&flow, now),
                253 if n == 1 => {
                    states.set_settings(Settings { dyn_max: MOST - i % 100, ..settings.clone() })
                }
                253 => _ = states.prepare(),
                254 => states.idle(),
                _ if i % 16 == 0 => assert!(states.list(now).all(|listed| (1..=5).contains(&listed.rule.0))),
                _ => {}
            }
        }
    });
    let end = NOW + std::time::Duration::from_secs(3);
    states.set_settings(settings);
    states.expire_all(end);
    let counters = states.counters();
    // The number of evictions depends on how soon the threads see removed rules.
    assert!(counters.full > 0 && counters.removed > 0, "{counters:?}");
    let gone = counters.expired + counters.removed + counters.evicted;
    assert_eq!(counters.created, gone + states.len() as u64, "{counters:?}");
    assert!(counters.peak <= u64::from(MOST));
    let is_state = |listed: &towpath_gate::state::Listed| !matches!(listed.kind, Kind::Parent { .. });
    assert_eq!(states.list(end).filter(is_state).count(), states.len());
    let by_rule: usize = (0..9).map(|rule| states.count_of(RuleId(rule))).sum();
    assert_eq!(by_rule, states.len());
    let limited = states.list(end).filter(|listed| matches!(listed.kind, Kind::Limit)).count();
    let counted = states.list(end).map(|listed| match listed.kind {
        Kind::Parent { count } => count as usize,
        Kind::State | Kind::Limit => 0,
    });
    // A parent that is used while its rule is being deleted is not listed until it is used again.
    let counted = counted.sum::<usize>();
    assert!(counted > 0 && counted <= limited, "{counted} of {limited}");
    // One second after the last state has expired.
    states.expire_all(end + std::time::Duration::from_secs(20));
    assert_eq!((states.len(), states.parents(), states.counters().unreplied), (0, 0, 0));
}

/// Workers insert states and look them up while a flood ends and the memory is given back.
#[test]
fn states_are_found_while_the_table_shrinks() {
    const STAY: u32 = 300;
    const FLOOD: u32 = if cfg!(miri) { 500 } else { 60_000 };
    let mut states = States::new(Settings::default(), 1);
    let long = Install { lifetime: Some(100_000), ..Install::default() };
    (0..STAY).for_each(|i| assert!(install(&mut states, &flow(i), &long, NOW).is_ok()));
    let (seconds, done, most) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let now = |seconds: u64| NOW + std::time::Duration::from_secs(seconds);
    let floods = if cfg!(miri) { 1 } else { 4 };
    states.idle();
    threads(&states, |n, states| {
        if n == 0 {
            for flood in 0..floods {
                let at = seconds.load(Ordering::Relaxed);
                for i in 0..FLOOD {
                    // Some of them stay, each in a page of its own.
                    let how = if i % 2000 == 0 { long } else { Install::default() };
                    let new = install(states, &flow(STAY + flood * FLOOD + i), &how, now(at));
                    assert_eq!(new, Ok(Installed::New));
                }
                most.fetch_max(states.memory(), Ordering::Relaxed);
                seconds.store(at + 1000, Ordering::Release);
                while states.len() > 20_000 {
                    states.expire(now(at + 1000), 1000);
                }
                // The memory is given back beside the lookups, and while the next flood begins.
                for _ in 0..200 {
                    states.expire(now(at + 1000), 100);
                    std::thread::yield_now();
                }
            }
            done.store(1, Ordering::Release);
            return;
        }
        let mut random = n as u32;
        while done.load(Ordering::Acquire) == 0 {
            let began = seconds.load(Ordering::Acquire);
            let at = now(began);
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let i = (random >> 8) % STAY;
            assert!(states.lookup(&flow(i), Lookup::Any, &PACKET, at).is_some(), "{i}");
            if n == 1 {
                states.prepare();
            } else {
                let own = flow(0x40_0000 * n as u32 + (random >> 20));
                assert!(install(states, &own, &Install::default(), at).is_ok());
                let found = states.lookup(&own, Lookup::Any, &PACKET, at).is_some();
                // It expires if the first thread goes on to a later time after the insertion.
                assert!(found || seconds.load(Ordering::Acquire) > began, "{own:?}");
                states.expire(at, 4);
            }
        }
    });
    let later = now(1_000_000);
    states.expire_all(later);
    states.expire_all(later);
    assert!(states.is_empty());
    while states.prepare() {}
    while states.prepare() {}
    let (after, most) = (states.memory(), most.into_inner());
    assert!(after < most / 3 || cfg!(miri), "{after} {most}");
}

/// The peak is exact for each reader, also between two looks of the worker at the number of all states.
#[test]
fn every_handle_reads_the_peak() {
    let states = States::new(Settings::default(), 1);
    let mut worker = states.worker().unwrap();
    for (made, peak) in [(10, 10), (3, 10), (70, 70), (69, 70)] {
        (0..made).for_each(|i| assert_eq!(keep(&mut worker, &flow(i)), Ok(Installed::New)));
        assert_eq!((states.counters().now, states.counters().peak), (made.into(), peak));
        (0..made).for_each(|i| assert!(worker.remove(&flow(i), Name::DEFAULT, NOW)));
        assert_eq!((states.counters().now, states.counters().peak), (0, peak));
    }
    drop(worker);
    assert_eq!(states.counters().peak, 70);
}
