//! Bounds on the number of states: `dyn_max`, limits and their parents, sources, and eviction.

use super::*;

#[test]
fn dyn_max_is_exact_and_counted() {
    let mut world = World::new(Settings { dyn_max: 3, ..Settings::default() });
    let v6 = Flow { proto: 17, ..flow6(17) };
    for flow in [udp(1, 1, 2, 2), udp(1, 2, 2, 2), v6] {
        world.keep(flow, 1).unwrap();
    }
    assert_eq!(world.keep(udp(1, 3, 2, 2), 1), Err(Refused::Full));
    assert_eq!(world.keep(v6, 1), Ok(Installed::Existing));
    assert_eq!(world.states.counters().full, 1);
    // `dyn_max` below the number of states: they stay, and no new one is admitted.
    world.states.set_settings(Settings { dyn_max: 1, ..Settings::default() });
    assert_eq!(world.states.len(), 3);
    assert_eq!(world.keep(udp(1, 3, 2, 2), 1), Err(Refused::Full));
    world.states.set_settings(Settings { dyn_max: 4, ..Settings::default() });
    assert_eq!(world.keep(udp(1, 3, 2, 2), 1), Ok(Installed::New));
    assert_eq!((world.states.len(), world.states.counters().peak, world.states.counters().full), (4, 4, 2));
}

#[test]
fn limits_count_by_their_mask() {
    let rows = [
        (LimitMask::SRC_ADDR, udp(1, 9, 8, 9), udp(2, 1, 3, 4)),
        (LimitMask::SRC_PORT, udp(9, 2, 9, 9), udp(1, 9, 3, 4)),
        (LimitMask::DST_ADDR, udp(9, 9, 3, 9), udp(1, 2, 9, 4)),
        (LimitMask::DST_PORT, udp(9, 9, 9, 4), udp(1, 2, 3, 9)),
        (LimitMask::SRC_ADDR | LimitMask::DST_PORT, udp(1, 9, 9, 4), udp(1, 2, 3, 9)),
        (LimitMask::SRC_ADDR | LimitMask::DST_ADDR, udp(1, 9, 3, 9), udp(3, 4, 1, 2)),
    ];
    for (mask, same, other) in rows {
        let mut world = World::new(Settings::default());
        assert_eq!(world.limit(udp(1, 2, 3, 4), 1, mask, 1), Ok(Installed::New));
        assert_eq!(world.limit(same, 1, mask, 1), Err(Refused::OverLimit), "{mask:?}");
        // Another rule and another protocol are counted separately.
        assert_eq!(world.limit(Flow { proto: 6, ..same }, 1, mask, 1), Ok(Installed::New));
        assert_eq!(world.limit(same, 2, mask, 1), Ok(Installed::New));
        if other != udp(3, 4, 1, 2) {
            assert_eq!(world.limit(other, 1, mask, 1), Ok(Installed::New), "{mask:?}");
        }
        assert_eq!(world.states.counters().over_limit, 1);
    }
}

#[test]
fn a_limit_counts_live_children() {
    let mut world = World::new(Settings::default());
    for port in 1..=2 {
        world.limit(udp(1, port, 2, 53), 1, LimitMask::SRC_ADDR, 2).unwrap();
    }
    assert_eq!(
        world.lines(),
        [
            "00001 0 0 (5s) PARENT 2 udp 10.0.0.1 0 <-> 0.0.0.0 0 :default",
            "00001 1 50 (10s) LIMIT udp 10.0.0.1 1 <-> 10.0.0.2 53 :default",
            "00001 1 50 (10s) LIMIT udp 10.0.0.1 2 <-> 10.0.0.2 53 :default",
        ]
    );
    // Neither a hit on a child nor a refusal counts as another child.
    assert_eq!(world.limit(udp(2, 53, 1, 1), 1, LimitMask::SRC_ADDR, 2), Ok(Installed::Existing));
    assert_eq!(world.limit(udp(1, 3, 2, 53), 1, LimitMask::SRC_ADDR, 2), Err(Refused::OverLimit));
    world.wait(9);
    assert!(world.find(udp(1, 1, 2, 53), Lookup::Any).is_some());
    world.wait(1);
    assert_eq!(world.limit(udp(1, 3, 2, 53), 1, LimitMask::SRC_ADDR, 2), Ok(Installed::New));
    assert_eq!(world.limit(udp(1, 4, 2, 53), 1, LimitMask::SRC_ADDR, 2), Err(Refused::OverLimit));
    world.wait(10);
    world.states.expire_all(world.now);
    assert_eq!((world.states.len(), world.states.parents()), (0, 0));
}

#[test]
fn a_parent_outlives_its_last_use() {
    let settings = Settings { dyn_udp_lifetime: 2, ..Settings::default() };
    let mut world = World::new(settings);
    world.limit(udp(1, 1, 2, 53), 1, LimitMask::SRC_ADDR, 1).unwrap();
    world.wait(2);
    world.states.expire_all(world.now);
    assert_eq!(world.lines(), ["00001 0 0 (3s) PARENT 0 udp 10.0.0.1 0 <-> 0.0.0.0 0 :default"]);
    world.wait(3);
    world.states.expire_all(world.now);
    assert_eq!(world.states.parents(), 0);
}

#[test]
fn dyn_parent_max_is_exact() {
    let settings = Settings { dyn_parent_max: 2, dyn_udp_lifetime: 1, ..Settings::default() };
    let mut world = World::new(settings);
    for src in 1..=2 {
        world.limit(udp(src, 1, 9, 53), 1, LimitMask::SRC_ADDR, 5).unwrap();
    }
    assert_eq!(world.limit(udp(3, 1, 9, 53), 1, LimitMask::SRC_ADDR, 5), Err(Refused::ParentsFull));
    assert_eq!(world.limit(udp(2, 2, 9, 53), 1, LimitMask::SRC_ADDR, 5), Ok(Installed::New));
    assert_eq!(world.keep(udp(3, 1, 9, 53), 2), Ok(Installed::New));
    assert_eq!((world.states.parents(), world.states.counters().parents_full), (2, 1));
    world.wait(5);
    assert_eq!(world.limit(udp(4, 1, 9, 53), 1, LimitMask::SRC_ADDR, 5), Ok(Installed::New));
    assert_eq!(world.states.parents(), 1);
}

#[test]
fn a_full_table_releases_the_parent() {
    let mut world = World::new(Settings { dyn_max: 1, ..Settings::default() });
    world.keep(udp(9, 9, 9, 9), 1).unwrap();
    assert_eq!(world.limit(udp(1, 1, 2, 53), 2, LimitMask::SRC_ADDR, 1), Err(Refused::Full));
    world.states.remove_where(|rule| rule == RuleId(1));
    assert_eq!(world.limit(udp(1, 1, 2, 53), 2, LimitMask::SRC_ADDR, 1), Ok(Installed::New));
}

#[test]
fn a_flood_evicts_its_own_states() {
    let mut world = World::new(Settings { dyn_max: 100, dyn_evict: true, ..Settings::default() });
    let established: Vec<_> = (1..=60).map(|port| tcp_flow(1, port)).collect();
    established.iter().for_each(|&flow| connect(&mut world, flow));
    for port in 1..=10_000 {
        assert_eq!(syn(&mut world, tcp_flow(2, port)), Ok(Installed::New));
        assert!(world.states.len() <= 100);
    }
    assert!(established.iter().all(|&flow| world.find(flow, Lookup::Any).is_some()));
    assert_eq!(world.states.counters().evicted, 10_000 - 40);
    // The last states of the flood remain.
    assert!(world.find(tcp_flow(2, 9_900), Lookup::Any).is_none());
    assert!(world.find(tcp_flow(2, 10_000), Lookup::Any).is_some());
}

#[test]
fn of_assured_states_the_first_to_expire_is_evicted() {
    let mut world = World::new(Settings { dyn_max: 3, dyn_evict: true, ..Settings::default() });
    for port in [2, 3, 1] {
        connect(&mut world, tcp_flow(1, port));
        world.wait(1);
    }
    syn(&mut world, tcp_flow(2, 1)).unwrap();
    assert!(world.find(tcp_flow(1, 2), Lookup::Any).is_none());
    // A state without a reply is evicted first.
    syn(&mut world, tcp_flow(2, 2)).unwrap();
    assert!(world.find(tcp_flow(2, 1), Lookup::Any).is_none());
    connect(&mut world, tcp_flow(2, 2));
    syn(&mut world, tcp_flow(2, 3)).unwrap();
    assert!(world.find(tcp_flow(1, 3), Lookup::Any).is_none());
    assert!(world.find(tcp_flow(1, 1), Lookup::Any).is_some());
}

#[test]
fn an_evicted_child_no_longer_counts() {
    let mut world = World::new(Settings { dyn_max: 1, dyn_evict: true, ..Settings::default() });
    assert_eq!(world.limit(udp(1, 1, 2, 53), 1, LimitMask::SRC_ADDR, 1), Ok(Installed::New));
    assert_eq!(world.limit(udp(1, 2, 2, 53), 1, LimitMask::SRC_ADDR, 1), Err(Refused::OverLimit));
    assert_eq!(world.keep(udp(3, 1, 2, 53), 1), Ok(Installed::New));
    assert_eq!(world.limit(udp(1, 2, 2, 53), 1, LimitMask::SRC_ADDR, 1), Ok(Installed::New));
}

#[test]
fn the_states_of_a_source_are_bounded() {
    let mut world = World::new(Settings { dyn_source_max: 2, ..Settings::default() });
    for port in 1..=2 {
        assert_eq!(world.keep(udp(1, port, 2, 53), 1), Ok(Installed::New));
    }
    assert_eq!(world.keep(udp(1, 3, 2, 53), 1), Err(Refused::OverSource));
    assert_eq!(world.keep(udp(1, 2, 2, 53), 1), Ok(Installed::Existing));
    assert_eq!(world.keep(udp(3, 3, 1, 53), 1), Ok(Installed::New));
    world.wait(10);
    assert_eq!(world.keep(udp(1, 3, 2, 53), 1), Ok(Installed::New));
    assert_eq!(world.states.counters().over_source, 1);
}

#[test]
fn nearly_full_is_reported_with_hysteresis() {
    let mut world = World::new(Settings { dyn_max: 10, ..Settings::default() });
    let mut nearly = Vec::new();
    for port in 1..=10 {
        world.keep(udp(1, port, 2, 53), port.into()).unwrap();
        nearly.push(world.states.is_nearly_full());
    }
    assert_eq!(nearly.iter().position(|&nearly| nearly), Some(8));
    let gauge = world.states.counters();
    assert_eq!((gauge.now, gauge.unreplied, gauge.max), (10, 10, 10));
    world.states.remove_where(|rule| rule.0 <= 2);
    world.states.expire_all(world.now);
    assert!(world.states.is_nearly_full());
    world.states.remove_where(|rule| rule.0 <= 3);
    world.states.expire_all(world.now);
    assert!(!world.states.is_nearly_full());
    (1..=2).for_each(|port| assert_eq!(world.keep(udp(1, port, 2, 53), 1), Ok(Installed::New)));
    assert_eq!(world.states.counters().nearly_full, 2);
}

#[test]
fn states_of_both_families_are_evicted() {
    let mut world = World::new(Settings { dyn_max: 2, dyn_evict: true, ..Settings::default() });
    let v6 = |src_port| Flow { src_port, ..flow6(6) };
    connect(&mut world, tcp_flow(1, 1));
    world.wait(1);
    connect(&mut world, v6(1));
    world.wait(1);
    connect(&mut world, v6(2));
    assert_eq!(world.find(tcp_flow(1, 1), Lookup::Any), None);
    world.wait(1);
    connect(&mut world, tcp_flow(1, 2));
    assert_eq!(world.find(v6(1), Lookup::Any), None);
    assert!(world.find(v6(2), Lookup::Any).is_some());
}

#[test]
fn a_parent_with_expired_children_only_is_collected() {
    let mut world = World::new(Settings { dyn_parent_max: 2, ..Settings::default() });
    world.limit(udp(1, 1, 9, 53), 1, LimitMask::SRC_ADDR, 5).unwrap();
    world.wait(9);
    world.limit(udp(2, 1, 9, 53), 1, LimitMask::SRC_ADDR, 5).unwrap();
    world.wait(1);
    // The first parent and its child have expired and were not collected. There is room for one parent.
    world.states.set_settings(Settings { dyn_parent_max: 1, ..Settings::default() });
    assert_eq!(world.limit(udp(1, 2, 9, 53), 1, LimitMask::SRC_ADDR, 5), Err(Refused::ParentsFull));
    assert_eq!(world.limit(udp(2, 2, 9, 53), 1, LimitMask::SRC_ADDR, 5), Ok(Installed::New));
}

#[test]
fn removed_states_are_stale_at_once_and_unlinked_later() {
    let mut world = World::new(Settings::default());
    let mut other = world.states.worker().unwrap();
    for port in 1..=3000 {
        world.keep(udp(1, port, 2, 53), 1 + u32::from(port % 3)).unwrap();
    }
    assert_eq!(world.states.remove_where(|rule| rule == RuleId(1)), 1000);
    // The removal did not scan the states.
    assert_eq!((world.states.len(), world.states.counters().removed), (3000, 0));
    assert_eq!((world.states.count_of(RuleId(1)), world.lines().len()), (0, 2000));
    assert_eq!(world.find(udp(1, 3, 2, 53), Lookup::Any), None);
    let mut hits = [None; 2];
    let packets = [3, 4].map(|port| Some((udp(1, port, 2, 53), PACKET)));
    assert_eq!(other.lookup_burst(packets, Lookup::Any, world.now, &mut hits), 2);
    assert_eq!(hits.map(|hit| hit.map(|hit| hit.rule.0)), [None, Some(2)]);
    assert!(!other.remove(&udp(1, 6, 2, 53), Name::DEFAULT, world.now));
    // Another state uses its slot. New states of the rule are like those of other rules.
    assert_eq!(world.keep(udp(1, 9, 2, 53), 7), Ok(Installed::New));
    assert_eq!(world.keep(udp(1, 12, 2, 53), 1), Ok(Installed::New));
    assert_eq!(world.states.count_of(RuleId(1)), 1);
    let mut calls = 0;
    while world.states.len() > 2002 {
        other.expire(world.now, 64);
        calls += 1;
    }
    assert!((10..=3000 / 32 + 1).contains(&calls), "{calls}");
    assert_eq!(world.states.counters().removed, 1000);
    assert_eq!(world.find(udp(1, 9, 2, 53), Lookup::Any), Some((7, Direction::Forward)));
    assert_eq!(world.find(udp(1, 12, 2, 53), Lookup::Any), Some((1, Direction::Forward)));
    (1..=3000).filter(|port| port % 3 != 0).for_each(|port| {
        assert!(world.find(udp(1, port, 2, 53), Lookup::Any).is_some(), "{port}");
    });
}

#[test]
fn removed_states_stay_stale_over_all_generations() {
    let mut world = World::new(Settings::default());
    for port in 1..=1000 {
        world.keep(udp(1, port, 2, 53), 1).unwrap();
        world.states.remove_where(|_| true);
        for before in [1, port / 2, port] {
            assert_eq!(world.find(udp(1, before, 2, 53), Lookup::Any), None, "{port} {before}");
        }
        assert_eq!(world.lines(), [""; 0]);
    }
    world.states.expire_all(world.now);
    assert_eq!((world.states.len(), world.states.counters().removed), (0, 1000));
}

#[test]
fn removed_states_release_all_bounds() {
    let settings = Settings { dyn_max: 2, dyn_parent_max: 1, dyn_source_max: 2, ..Settings::default() };
    let mut world = World::new(settings);
    let shared = |world: &mut World, port, rule| {
        let limit = Limit { shared: Some(name(9)), ..Limit::new(LimitMask::SRC_ADDR, 2) };
        world.install(udp(1, port, 2, 53), rule, Install { limit: Some(limit), ..Install::default() })
    };
    for port in 1..=2 {
        assert_eq!(shared(&mut world, port, 1), Ok(Installed::New));
    }
    assert!(shared(&mut world, 3, 2).is_err());
    world.states.remove_where(|rule| rule == RuleId(1));
    for port in 3..=4 {
        assert_eq!(shared(&mut world, port, 2), Ok(Installed::New));
    }
    assert!(shared(&mut world, 5, 2).is_err());
    // The shared parent is removed with its states; the rule's own parent needs its slot.
    world.states.remove_where(|_| true);
    world.wait(5);
    assert_eq!(world.limit(udp(3, 1, 2, 53), 3, LimitMask::SRC_ADDR, 1), Ok(Installed::New));
}
