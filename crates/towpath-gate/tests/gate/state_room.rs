//! Room for states that is free only after a grace period: floods, listings, idle and stalled handles.

use std::net::Ipv4Addr;
use std::time::Duration;

use towpath_gate::rules::Ruleset;
use towpath_gate::state::{
    Ends, Flow, Install, Installed, Lookup, Name, Refused, RuleId, Segment, Settings, States,
};
use towpath_gate::{Dir, Gate, Ports, StatePolicy, Step, Walk};
use towpath_wire::{self as wire, LinkType, Time};

const NOW: Time = Time::from_secs(1_000);

fn flow(n: u32) -> Flow {
    let ends = Ends::V4(Ipv4Addr::from(0x0a00_0000 + n), [192, 0, 2, 1].into());
    Flow { ends, proto: 6, src_port: 4000, dst_port: 80, zone: 0 }
}

fn flow6(n: u32) -> Flow {
    let src = (0x2001_0db8_u128 << 96 | u128::from(n)).into();
    Flow { ends: Ends::V6(src, "2001:db8::1:1".parse().unwrap(), 0), ..flow(0) }
}

fn segment(flags: u8, ack: u32) -> Segment {
    Segment { tcp_flags: flags, tcp_ack: ack, bytes: 60, ..Segment::default() }
}

fn syn(states: &mut States, flow: &Flow) -> Result<Installed, Refused> {
    states.install(flow, Name::DEFAULT, &segment(2, 0), RuleId(1), &Install::default(), NOW)
}

fn connect(states: &mut States, flow: &Flow) {
    syn(states, flow).unwrap();
    assert!(states.lookup(&flow.reversed(), Lookup::Any, &segment(0x12, 1), NOW).is_some());
    assert!(states.lookup(flow, Lookup::Any, &segment(0x10, 1), NOW).is_some());
}

fn evicting(dyn_max: u32) -> States {
    States::new(Settings { dyn_max, dyn_evict: true, ..Settings::default() }, 7)
}

fn left(states: &mut States, flows: impl Iterator<Item = Flow>) -> usize {
    flows.filter(|flow| states.lookup(flow, Lookup::Any, &segment(0x10, 1), NOW).is_some()).count()
}

#[test]
fn a_flood_does_not_empty_the_table_while_a_worker_stalls() {
    for make in [flow, flow6] {
        // Established connections, of 2000 states: some, nearly all, and all.
        for established in [400, 1950, 2000] {
            let mut states = evicting(2000);
            (0..established).for_each(|n| connect(&mut states, &make(n)));
            let mut stalled = states.worker().unwrap();
            stalled.expire(NOW, 0);
            let flood = (0..20_000).map(|n| syn(&mut states, &make(100_000 + n)));
            let made = flood.filter(Result::is_ok).count();
            assert_eq!(made, 2000 - established as usize, "free slots are used");
            let evicted = states.counters().evicted;
            assert!(evicted <= 2000 / 16, "{evicted} of {established}");
            // Where all are assured, one is evicted.
            let evicted_of_all = usize::from(established == 2000);
            assert_eq!(left(&mut states, (0..established).map(make)), established as usize - evicted_of_all);
            // The handle is called again.
            stalled.expire(NOW, 0);
            assert_eq!(syn(&mut states, &make(99_999)), Ok(Installed::New));
        }
    }
}

#[test]
fn a_flood_is_admitted_as_slots_become_free() {
    let mut states = evicting(8000);
    (0..3000).for_each(|n| connect(&mut states, &flow(n)));
    let mut other = states.worker().unwrap();
    let mut refused = 0;
    for n in 0..100_000 {
        if n % 200 == 0 {
            other.expire(NOW, 0);
        }
        refused += u32::from(syn(&mut states, &flow(100_000 + n)).is_err());
    }
    assert!(refused < 1000, "{refused} of 100,000");
    assert_eq!(left(&mut states, (0..3000).map(flow)), 3000);
}

#[test]
fn a_flood_evicts_its_own_states_behind_any_number_of_connections() {
    for make in [flow, flow6] {
        let mut states = evicting(10_000);
        (0..5000).for_each(|n| connect(&mut states, &make(n)));
        let refused = (0..50_000).filter(|n| syn(&mut states, &make(100_000 + n)).is_err()).count();
        // A round of 10,000 slots passes 5,000 connections, 512 with each refused install.
        assert!(refused <= 45_000 / 5000 * 10 + 10, "{refused} of 50,000");
        assert_eq!(left(&mut states, (0..5000).map(make)), 5000);
        assert_eq!(states.len(), 10_000);
    }
}

/// A server replies to forged addresses, but the sender does not receive the reply.
#[test]
fn a_flood_with_replies_evicts_no_connection() {
    const SCTP: u8 = 132;
    let packet = |flags, ack, sctp_chunk| Segment { sctp_chunk, ..segment(flags, ack) };
    // The packets of a flood with replies: SYN and SYN-ACK; the same twice; a reset and an ACK; an ACK that the
    // server resets.
    let tcp: [&[(bool, Segment)]; 4] = [
        &[(true, segment(0x02, 0)), (false, segment(0x12, 1))],
        &[
            (true, segment(0x02, 0)),
            (false, segment(0x12, 1)),
            (true, segment(0x02, 0)),
            (false, segment(0x12, 1)),
        ],
        &[(true, segment(0x02, 0)), (false, segment(0x14, 1)), (true, segment(0x10, 1))],
        &[(true, segment(0x10, 7)), (false, segment(0x04, 0)), (true, segment(0x10, 7))],
    ];
    let sctp: [&[(bool, Segment)]; 3] = [
        &[(true, packet(0, 0, Some(1))), (false, packet(0, 0, Some(2)))],
        &[(true, packet(0, 0, Some(1))), (false, packet(0, 0, Some(2))), (true, packet(0, 0, Some(10)))],
        &[(true, packet(0, 0, Some(0))), (false, packet(0, 0, Some(6)))],
    ];
    let floods = tcp.map(|story| (6, story)).into_iter().chain(sctp.map(|story| (SCTP, story)));
    for (proto, story) in floods {
        for make in [flow, flow6] {
            let settings = Settings { dyn_max: 100, dyn_evict: true, dyn_sctp: true, ..Settings::default() };
            let mut states = States::new(settings, 7);
            let datagrams = |n| Flow { proto: 17, ..make(n) };
            let associations = |n| Flow { proto: SCTP, ..make(n) };
            (0..20).for_each(|n| connect(&mut states, &make(n)));
            for n in 0..20 {
                syn(&mut states, &datagrams(n)).unwrap();
                states.lookup(&datagrams(n).reversed(), Lookup::Any, &segment(0, 0), NOW).unwrap();
                let open = |chunk| packet(0, 0, Some(chunk));
                let flow = associations(n);
                states.install(&flow, Name::DEFAULT, &open(1), RuleId(1), &Install::default(), NOW).unwrap();
                for (flow, chunk) in [(flow.reversed(), 2), (flow, 10), (flow.reversed(), 11)] {
                    states.lookup(&flow, Lookup::Any, &open(chunk), NOW).unwrap();
                }
            }
            assert_eq!(states.counters().unreplied, 0);
            for n in 0..1000 {
                let flow = Flow { proto, ..make(100_000 + n) };
                let mut packets = story.iter();
                let (_, first) = packets.next().unwrap();
                states.install(&flow, Name::DEFAULT, first, RuleId(1), &Install::default(), NOW).unwrap();
                for (forward, segment) in packets {
                    let flow = if *forward { flow } else { flow.reversed() };
                    states.lookup(&flow, Lookup::Any, segment, NOW).unwrap();
                }
            }
            assert_eq!((states.len(), states.counters().unreplied), (100, 40), "{proto} {story:?}");
            assert_eq!(left(&mut states, (0..20).map(make)), 20, "{proto} {story:?}");
            assert_eq!(left(&mut states, (0..20).map(datagrams)), 20, "{proto} {story:?}");
            assert_eq!(left(&mut states, (0..20).map(associations)), 20, "{proto} {story:?}");
        }
    }
}

/// A connection that was picked up in the middle, or opened from the other side, is assured when both sides have acknowledged
/// each other.
#[test]
fn a_connection_picked_up_in_the_middle_becomes_assured() {
    let mut states = evicting(100);
    let stories = [
        [(true, 0x18), (false, 0x10), (true, 0x18)],
        [(true, 0x12), (false, 0x10), (true, 0x10)],
        [(true, 0x02), (false, 0x12), (true, 0x11)],
    ];
    for (n, story) in stories.into_iter().enumerate() {
        let flow = flow(n as u32);
        for (at, (forward, flags)) in story.into_iter().enumerate() {
            assert_eq!(states.counters().unreplied, u64::from(at > 0), "{n}: {at}");
            let (flow, packet) = (if forward { flow } else { flow.reversed() }, segment(flags, 1));
            if at == 0 {
                states.install(&flow, Name::DEFAULT, &packet, RuleId(1), &Install::default(), NOW).unwrap();
            } else {
                states.lookup(&flow, Lookup::Any, &packet, NOW).unwrap();
            }
        }
        assert_eq!(states.counters().unreplied, 0, "{n}");
    }
}

/// A table of 3,000 states under connections, floods and a second handle that is called at random: the eviction
/// cursor wraps around many times.
#[test]
fn floods_evict_no_connection_under_random_operations() {
    for seed in 1..=3_u64 {
        let mut states = evicting(3000);
        let mut other = states.worker().unwrap();
        let mut random = seed;
        let mut next = |below: u32| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as u32 % below
        };
        let (mut connected, mut flood) = (Vec::new(), 1_000_000);
        let (mut made, mut refused) = (0, 0);
        for _ in 0..3000 {
            let make = if next(3) == 0 { flow6 } else { flow };
            match next(8) {
                // At most half of the table: there is always a state that is not assured.
                0 if connected.len() < 1500 => {
                    let flow = make(connected.len() as u32);
                    if syn(&mut states, &flow).is_ok() {
                        states.lookup(&flow.reversed(), Lookup::Any, &segment(0x12, 1), NOW).unwrap();
                        states.lookup(&flow, Lookup::Any, &segment(0x10, 1), NOW).unwrap();
                        connected.push(flow);
                    }
                }
                1 => other.expire(NOW, next(64) as usize),
                2 => other.idle(),
                3 => states.expire(NOW, 64),
                _ => {
                    for _ in 0..next(64) {
                        flood += 1;
                        match syn(&mut states, &make(flood)) {
                            Ok(_) => made += 1,
                            Err(refusal) => {
                                assert_eq!(refusal, Refused::Full);
                                refused += 1;
                            }
                        }
                    }
                }
            }
            let gauge = states.counters();
            assert!(gauge.now + gauge.waiting <= 3000 && gauge.waiting <= 3000 / 16, "{gauge:?}");
        }
        assert_eq!(left(&mut states, connected.iter().copied()), connected.len(), "seed {seed}");
        let counters = states.counters();
        assert_eq!(counters.created, states.len() as u64 + counters.evicted);
        assert!(counters.evicted > 3 * 3000 && refused < made, "{counters:?}, {refused} of {made}");
    }
}

#[test]
fn slots_are_not_reused_while_a_listing_reads_them() {
    let mut states = States::new(Settings { dyn_max: 2, ..Settings::default() }, 7);
    (0..2).for_each(|n| connect(&mut states, &flow(n)));
    let reader = states.worker().unwrap();
    let mut entries = reader.list(NOW);
    let (mut second, first) = (reader.list(NOW), entries.next().unwrap());
    assert_eq!(first.flow, flow(0));
    // The slot of a removed state waits for both iterators.
    assert!(states.remove(&flow(1), Name::DEFAULT, NOW));
    assert_eq!(syn(&mut states, &flow(2)), Err(Refused::Full));
    assert!(second.next().is_some());
    drop(second);
    assert_eq!(syn(&mut states, &flow(2)), Err(Refused::Full));
    assert!(entries.next().is_none());
    drop(entries);
    assert_eq!(syn(&mut states, &flow(2)), Ok(Installed::New));
    assert!(reader.is_idle());
}

#[test]
fn other_workers_free_the_slots_of_an_idle_one() {
    let mut states = States::new(Settings { dyn_max: 100, ..Settings::default() }, 7);
    (0..100).for_each(|n| connect(&mut states, &flow(n)));
    let mut supervisor = states.worker().unwrap();
    assert_eq!(supervisor.remove_where(|_| true), 100);
    supervisor.idle();
    (0..100).for_each(|n| assert_eq!(syn(&mut states, &flow(n)), Ok(Installed::New), "{n}"));
}

/// Evicting one state for each new one makes no room: no connection is evicted in vain.
#[test]
fn lowering_dyn_max_evicts_no_connection() {
    for make in [flow, flow6] {
        let mut states = evicting(300);
        (0..200).for_each(|n| connect(&mut states, &make(n)));
        (200..300).for_each(|n| assert!(syn(&mut states, &make(n)).is_ok()));
        states.set_settings(Settings { dyn_max: 20, ..states.settings().clone() });
        (0..500).for_each(|n| assert_eq!(syn(&mut states, &make(1000 + n)), Err(Refused::Full)));
        assert_eq!((states.len(), states.counters().evicted), (300, 0));
        // One connection more than `dyn_max`.
        states.set_settings(Settings { dyn_max: 199, ..states.settings().clone() });
        states.expire_all(NOW + Duration::from_secs(20));
        let late = |states: &mut States, n| {
            let now = NOW + Duration::from_secs(20);
            states.install(&make(n), Name::DEFAULT, &segment(2, 0), RuleId(1), &Install::default(), now)
        };
        assert_eq!((states.len(), late(&mut states, 2000)), (200, Err(Refused::Full)));
        states.remove(&make(0), Name::DEFAULT, NOW);
        assert_eq!((late(&mut states, 2000), states.counters().evicted), (Ok(Installed::New), 1));
    }
}

/// Stale states count until they are unlinked: no packet waits for a full sweep.
#[test]
fn an_install_over_a_limit_collects_some_stale_states() {
    let mut states = States::new(Settings { dyn_source_max: 1, ..Settings::default() }, 7);
    (0..5000).for_each(|n| connect(&mut states, &flow(n)));
    assert_eq!(states.remove_where(|_| true), 5000);
    let mut asked = 0;
    for source in [0, 2500, 4999] {
        let again = Flow { src_port: 1, ..flow(source) };
        loop {
            let made = syn(&mut states, &again);
            asked += 1;
            assert!(5000 - states.len() <= 512 * asked, "{} after {asked}", states.len());
            match made {
                Ok(_) => break,
                Err(refusal) => assert_eq!(refusal, Refused::OverSource),
            }
        }
    }
    assert!((4..=13).contains(&asked), "{asked}");
}

/// A datagram of flow `n`.
fn datagram(n: u32) -> [u8; 28] {
    let mut frame = [0; 28];
    frame[..12].copy_from_slice(&[0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0]);
    frame[12..16].copy_from_slice(&(0x0a00_0000 + n).to_be_bytes());
    frame[16..28].copy_from_slice(&[192, 0, 2, 1, 4, 0, 0, 53, 0, 8, 0, 0]);
    frame
}

#[test]
fn slots_do_not_wait_for_a_gate_without_packets() {
    let rules =
        |text: &str| Ruleset::parse("t", &format!("{text}\nadd 100 allow udp from any to any keep-state"));
    let new = || {
        let settings = Settings { dyn_max: 200, ..Settings::default() };
        Gate::new(rules("").ruleset.unwrap(), Ports::new(), settings, 7)
    };
    let mut snapshot = Vec::new();
    new().snapshot(NOW, |piece| snapshot.extend_from_slice(piece));
    let count = || rules("add 50 count ip from any to any").ruleset.unwrap();
    type Call<'a> = &'a dyn Fn(&mut Gate);
    let calls: [(&str, Call<'_>); 4] = [
        ("restore", &|gate| assert_eq!(gate.restore(&snapshot, NOW).unwrap().refused, 0)),
        ("reload", &|gate| drop(gate.reload(count(), StatePolicy::Recheck, NOW))),
        ("expire", &|gate| gate.expire(NOW, 0)),
        ("keepalives", &|gate| gate.keepalives(NOW, 1, |_| ())),
    ];
    for (name, call) in calls {
        let mut gate = new();
        let mut walker = gate.walker().unwrap();
        call(&mut gate);
        // 100 flows at a time.
        for n in 0..1000 {
            let now = NOW + Duration::from_secs(15) * (n / 100);
            let frame = datagram(n);
            let packet = wire::parse(LinkType::RAW, &frame, 28).unwrap();
            let step = walker.walk(&mut Walk::new(Dir::In, None, None), &packet, now);
            assert_eq!(step, Step::Pass, "{name}: {n}");
            walker.expire(now, 64);
        }
    }
}

/// A refused flood does not sweep the same slots repeatedly, and is admitted when states have expired.
#[test]
fn installs_are_admitted_when_states_have_expired() {
    const MOST: u32 = 3000;
    for make in [flow, flow6] {
        let mut states = States::new(Settings { dyn_max: MOST, ..Settings::default() }, 7);
        (0..MOST).for_each(|n| assert_eq!(syn(&mut states, &make(n)), Ok(Installed::New)));
        let mut at = |n, now| {
            let (segment, install) = (segment(2, 0), Install::default());
            states.install(&make(n), Name::DEFAULT, &segment, RuleId(1), &install, now)
        };
        // Enough calls to have swept all slots in vain, in every tick until the states expire.
        for tick in 0..70 {
            let now = NOW + Duration::from_millis(285 * tick);
            (0..50).for_each(|n| assert_eq!(at(10_000 + n, now), Err(Refused::Full)));
        }
        let over = NOW + Duration::from_secs(20);
        (0..MOST).for_each(|n| assert_eq!(at(20_000 + n, over), Ok(Installed::New), "{n}"));
    }
}

#[test]
fn expired_states_are_collected_while_the_table_grows() {
    for make in [flow, flow6] {
        // New states per burst, and the budget.
        for (burst, budget) in [(1, 2), (8, 16), (32, 64), (32, 256), (100, 128)] {
            let settings = Settings { dyn_syn_lifetime: 10, ..Settings::default() };
            let mut states = States::new(Settings { dyn_max: 1_000_000, ..settings }, 7);
            // 1,000 bursts per lifetime.
            for n in 0..12_000 {
                let now = NOW + Duration::from_millis(10) * n;
                states
                    .install(&make(n), Name::DEFAULT, &segment(2, 0), RuleId(1), &Install::default(), now)
                    .unwrap();
                if n % burst == 0 {
                    states.expire(now, budget);
                }
            }
            assert!(states.len() < 2_500, "{} left with {burst} and {budget}", states.len());
        }
    }
}

/// A connection that begins while the table is nearly full has a shorter SYN lifetime (`dyn_adaptive`).
#[test]
fn connections_in_a_nearly_full_table_have_a_short_syn_lifetime() {
    let lifetimes = |dyn_adaptive| {
        let settings = Settings { dyn_max: 10, dyn_adaptive, ..Settings::default() };
        let mut states = States::new(settings, 7);
        assert!((0..10).all(|n| syn(&mut states, &flow(n)).is_ok()));
        // One slot becomes free: still nearly full.
        assert!(states.remove(&flow(0), Name::DEFAULT, NOW));
        syn(&mut states, &flow(10)).unwrap();
        // Three more: no longer nearly full.
        (1..4).for_each(|n| assert!(states.remove(&flow(n), Name::DEFAULT, NOW)));
        syn(&mut states, &flow(11)).unwrap();
        // A connection that is answered has the usual lifetime.
        assert!(states.lookup(&flow(10).reversed(), Lookup::Any, &segment(0x12, 1), NOW).is_some());
        assert!(states.lookup(&flow(10), Lookup::Any, &segment(0x10, 1), NOW).is_some());
        [8, 9, 10, 11].map(|n| {
            let listed = states.list(NOW).find(|listed| listed.flow == flow(n)).unwrap();
            listed.remaining.as_secs()
        })
    };
    assert_eq!(lifetimes(true), [20, 5, 300, 20]);
    assert_eq!(lifetimes(false), [20, 20, 300, 20]);
}
