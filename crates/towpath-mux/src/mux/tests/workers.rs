//! Scheduling: workers that are woken, passed over, recalled, or abandoned.

use super::*;

/// KCM's most important fault: 154 of 400 messages waited behind a worker that did not read.
#[test]
fn a_message_does_not_wait_behind_a_busy_worker() {
    let (mut mux, psock) = lines(Config::new(Order::None));
    let stuck = mux.clone_worker(1, at(0));
    let free = mux.clone_worker(1, at(0));
    mux.handle_bytes(psock, &b"x\n".repeat(400), at(0));
    assert_eq!(tickets(&mut mux, stuck, at(0)).len(), 1);
    let mut done = 0;
    while let [ticket] = tickets(&mut mux, free, at(1))[..] {
        assert!(mux.done(free, ticket, at(1)));
        done += 1;
    }
    assert_eq!((done, mux.queued()), (399, 0));
}

#[test]
fn one_idle_worker_is_woken_and_it_wakes_the_next() {
    let (mut mux, psock) = lines(Config { wake_cost: Duration::ZERO, ..Config::new(Order::None) });
    let workers = [0; 4].map(|_| mux.clone_worker(1, at(0)));
    for worker in workers {
        assert!(poll(&mut mux, worker, at(0)).is_empty());
    }
    mux.handle_bytes(psock, &b"x\n".repeat(40), at(0));
    for worker in workers {
        let woken = events(&mut mux)
            .into_iter()
            .filter_map(|event| match event {
                Event::Wake(worker) => Some(worker),
                _ => None,
            })
            .collect::<Vec<_>>();
        assert_eq!(woken, [worker]);
        assert_eq!(poll(&mut mux, worker, at(0)).len(), 1);
    }
}

#[test]
fn batches_follow_what_messages_take() {
    let (mut mux, psock) = lines(Config::new(Order::None));
    let worker = mux.clone_worker(64, at(0));
    let round = |mux: &mut Mux, nanos: u64| {
        mux.handle_bytes(psock, &b"x\n".repeat(100), at(0));
        let mut sizes = Vec::new();
        loop {
            let now = Time::from_secs(2);
            let batch = tickets(mux, worker, now);
            if batch.is_empty() {
                return sizes;
            }
            sizes.push(batch.len());
            let then = mux.now + Duration::from_nanos(nanos * batch.len() as u64);
            for ticket in batch {
                mux.done(worker, ticket, then);
            }
        }
    };
    let slow = round(&mut mux, 500_000);
    assert!(slow.iter().all(|size| *size == 1), "half a millisecond each: {slow:?}");
    for _ in 0..10 {
        round(&mut mux, 100);
    }
    let fast = round(&mut mux, 100);
    assert_eq!(fast, [64, 36], "a tenth of a microsecond each");
}

/// One message in fifty takes 20 ms: a worker that begins one has been replaced, although the messages before
/// took almost no time.
#[test]
fn a_slow_message_is_remembered_while_fast_ones_follow() {
    let (mut mux, psock) = lines(Config::new(Order::None));
    let worker = mux.clone_worker(1, at(0));
    let mut now = at(0);
    for (count, nanos) in [(50, 1000), (1, 20_000_000), (100, 1000)] {
        for _ in 0..count {
            mux.handle_bytes(psock, b"x\n", now);
            let batch = tickets(&mut mux, worker, now);
            now = now + Duration::from_nanos(nanos);
            mux.done(worker, batch[0], now);
            assert!(tickets(&mut mux, worker, now).is_empty());
        }
    }
    let cost = mux.config().wake_cost;
    assert!(mux.mean_service_time() < cost, "the average has forgotten the slow message");
    assert!(mux.slow_service_time() > cost);
}

#[test]
fn a_distant_worker_has_further_messages_for_a_round_trip() {
    // Rows: whether messages are known to take a millisecond, the round trip in microseconds, messages that a worker with a credit of 4 has.
    let rows = [
        (true, 0, 1),
        (true, 100, 1),
        (true, 125, 2),
        (true, 1000, 2),
        (true, 1500, 3),
        (true, 60_000, 4),
        (false, 1000, 1),
    ];
    for (known, trip, expected) in rows {
        let (mut mux, psock) = lines(Config::new(Order::None));
        let [far, near] = [4; 2].map(|credit| mux.clone_worker(credit, at(0)));
        if known {
            mux.service_time.record(1_000_000);
        }
        mux.set_round_trip(far, Duration::from_micros(trip));
        mux.handle_bytes(psock, &b"x\n".repeat(9), at(0));
        let mut held = [far, near].map(|worker| {
            let mut batches = Vec::new();
            mux.poll_batches(worker, usize::MAX, at(0), &mut batches)
        });
        assert_eq!(held, [expected, 1], "known: {known}, {trip} us");
        // It gets another one for each that it has done.
        let mut batches = Vec::new();
        held[0] += mux.poll_batches(far, usize::MAX, at(0), &mut batches);
        assert_eq!(held[0], expected);
        mux.check().expect("everything is counted");
    }
}

/// A round trip of a millisecond for messages that take a quarter of it: the number of messages grows until the worker is never idle.
#[test]
fn a_distant_worker_gets_as_many_messages_as_a_round_trip_takes() {
    const TRIP: u64 = 1000;
    const WORK: u64 = 250;
    let (mut mux, psock) = lines(Config::new(Order::None));
    let worker = mux.clone_worker(64, at(0));
    mux.set_round_trip(worker, Duration::from_micros(TRIP));
    mux.handle_bytes(psock, &b"x\n".repeat(16), at(0));
    let (mut now, mut free, mut held) = (0, 0, Vec::new());
    // Messages on their way, each with the time of its answer.
    let mut open = std::collections::VecDeque::new();
    for _ in 0..500 {
        let micros = |now: u64| at(0) + Duration::from_micros(now);
        mux.handle_bytes(psock, b"x\n", micros(now));
        for ticket in tickets(&mut mux, worker, micros(now)) {
            free = free.max(now + TRIP / 2) + WORK;
            open.push_back((ticket, free + TRIP / 2));
        }
        held.push(open.len());
        let (ticket, answered) = open.pop_front().expect("a message");
        now = answered;
        mux.done(worker, ticket, micros(now));
    }
    assert_eq!(held[0], 1, "the time of a message is not known");
    // Five are done in a round trip and the time of one.
    assert!(held[400..].iter().all(|held| (5..=6).contains(held)), "{held:?}");
}

#[test]
fn messages_not_begun_by_a_slow_worker_are_recalled() {
    let (mut mux, psock) = lines(Config::new(Order::None));
    let slow = mux.clone_worker(64, at(0));
    mux.service_time.ewma = 100;
    mux.handle_bytes(psock, b"a\nb\nc\n", at(0));
    let batch = tickets(&mut mux, slow, at(0));
    assert_eq!(batch.len(), 3);
    let idle = mux.clone_worker(64, at(0));
    assert!(poll(&mut mux, idle, at(0)).is_empty());
    assert!(events(&mut mux).is_empty(), "the message may be done before another worker is awake");
    assert_eq!(mux.poll_timeout(), Some(at(1)));
    mux.handle_timeout(at(1));
    assert!(matches!(events(&mut mux)[..], [Event::Recall(worker)] if worker == slow));
    mux.handle_hand_back(slow, &batch[1..], at(1));
    assert!(matches!(events(&mut mux)[..], [Event::Wake(worker)] if worker == idle));
    assert_eq!(poll(&mut mux, idle, at(1)), ["b", "c"]);
}

#[test]
fn a_woken_worker_that_does_not_ask_is_passed_over() {
    let (mut mux, psock) = lines(Config::new(Order::None));
    let workers = [0; 3].map(|_| mux.clone_worker(1, at(0)));
    for worker in workers {
        assert!(poll(&mut mux, worker, at(0)).is_empty());
    }
    let woken = |mux: &mut Mux| -> Vec<worker::Id> {
        let wakes = events(mux).into_iter().map(|event| match event {
            Event::Wake(worker) => worker,
            event => panic!("{event:?}"),
        });
        wakes.collect()
    };
    mux.disable(workers[2], true, at(0));
    mux.handle_bytes(psock, b"a\nb\n", at(0));
    assert_eq!(woken(&mut mux), [workers[0]]);
    assert_eq!(mux.poll_timeout(), Some(at(1)));
    mux.handle_timeout(at(1));
    assert_eq!(woken(&mut mux), [workers[1]], "the first worker's thread is busy");
    assert_eq!(mux.poll_timeout(), None, "all idle workers were woken");
    mux.handle_timeout(at(10));
    assert!(woken(&mut mux).is_empty());
    assert_eq!(poll(&mut mux, workers[1], at(10)), ["a"]);
    // The first worker asks late.
    assert_eq!(poll(&mut mux, workers[0], at(11)), ["b"]);
    assert!(mux.check().is_ok());
}

/// No worker can take the waiting or recallable messages: no timer is set for that.
#[test]
fn no_timer_without_a_worker_to_wake() {
    for order in [Order::None, Order::Sticky] {
        let (mut mux, psock) = lines(Config::new(order));
        let (busy, idle) = (mux.clone_worker(64, at(0)), mux.clone_worker(64, at(0)));
        mux.service_time.ewma = 100;
        mux.handle_bytes(psock, b"a\nb\n", at(0));
        assert_eq!(poll(&mut mux, busy, at(0)).len(), 2);
        assert!(poll(&mut mux, idle, at(0)).is_empty());
        if order == Order::None {
            mux.disable(idle, true, at(0));
            mux.handle_bytes(psock, b"c\n", at(0));
        }
        mux.handle_timeout(at(5));
        assert!(events(&mut mux).is_empty());
        assert_eq!(mux.schedule_timeout(), None, "{order:?}");
    }
}

#[test]
fn a_message_that_kills_workers_is_abandoned() {
    let (mut mux, psock) = lines(Config { redeliver: 1, ..Config::new(Order::None) });
    mux.handle_bytes(psock, b"poison\nfine\n", at(0));
    for deaths in 0..2 {
        let worker = mux.clone_worker(1, at(0));
        let mut batch = Vec::new();
        mux.poll_messages(worker, at(0), &mut batch);
        assert_eq!((batch[0].payload(), batch[0].deaths()), (&b"poison"[..], deaths));
        mux.handle_worker_died(worker, at(0));
        assert!(!mux.done(worker, batch[0].ticket(), at(0)), "a dead worker completes nothing");
        assert_eq!(mux.reply(worker, batch[0].ticket(), &b"x"[..], at(0)), Err(SendError::Gone));
    }
    let undone = events(&mut mux);
    assert!(matches!(&undone[..], [Event::Undone(message)] if message.payload() == b"poison"), "{undone:?}");
    let worker = mux.clone_worker(1, at(0));
    assert_eq!(poll(&mut mux, worker, at(0)), ["fine"]);
}
