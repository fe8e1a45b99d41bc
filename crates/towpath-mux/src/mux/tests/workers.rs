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
