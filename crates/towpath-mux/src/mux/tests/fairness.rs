//! Fairness between connections: order of service, shares, sticky workers, and messages of peers that have gone.

use super::*;

/// Messages of `psock` that are given to workers, which are all busy, before the one of `light`.
fn overtaken(mux: &mut Mux, workers: &[worker::Id], light: psock::Id, batches: bool) -> usize {
    let mut before = 0;
    for round in 1..10_000 {
        let worker = workers[round % workers.len()];
        let held: Vec<Ticket> = mux.workers.get(worker).expect("it is there").tickets().collect();
        held.into_iter().for_each(|ticket| assert!(mux.done(worker, ticket, at(0))));
        let mut given = Vec::new();
        if batches {
            let mut rows = Vec::new();
            mux.poll_batches(worker, usize::MAX, at(0), &mut rows);
            given.extend(rows.iter().flat_map(Batch::rest));
        } else {
            given.extend(tickets(mux, worker, at(0)));
        }
        if let Some(place) = given.iter().position(|ticket| ticket.psock == light) {
            return before + place;
        }
        before += given.len();
    }
    panic!("it is never served");
}

/// 5,000 messages of one peer wait, and all workers are busy with them. A message of another peer is begun after at most one turn of
/// the first: one message if messages are long, and one batch if they are short.
#[test]
fn a_peer_that_floods_delays_another_one_by_one_turn() {
    // Rows: service time in nanoseconds, batches, largest turn.
    for (each, batches, turn) in
        [(1_000_000, false, 1), (1_000_000, true, 1), (5_000, false, 40), (10, true, 64)]
    {
        for count in [1, 4] {
            // Also without a share, which would leave a worker free.
            let in_flight = Some(usize::MAX);
            let config = Config { psock_bytes: Bound::of(1 << 24), in_flight, ..Config::new(Order::None) };
            let (mut mux, flood) = lines(config);
            let light = attach(&mut mux);
            let workers: Vec<_> = (0..count).map(|_| mux.clone_worker(64, at(0))).collect();
            let time = &mut mux.service_time;
            (time.ewma, time.median, time.floor, time.ewma_slow) = (each, each, each, each);
            for _ in 0..50 {
                mux.handle_bytes(flood, &b"x\n".repeat(100), at(0));
            }
            for worker in &workers {
                let given = match batches {
                    true => mux.poll_batches(*worker, usize::MAX, at(0), &mut Vec::new()),
                    false => tickets(&mut mux, *worker, at(0)).len(),
                };
                assert_eq!(given, turn);
            }
            mux.handle_bytes(light, b"y\n", at(0));
            let before = overtaken(&mut mux, &workers, light, batches);
            assert!(before <= turn, "{each} ns, {count} workers: {before} messages were given before it");
            mux.check().expect("the counts fit");
        }
    }
}

#[test]
fn a_connection_has_at_most_its_share_in_flight() {
    let (mut mux, flood) = lines(Config { in_flight: Some(2), ..Config::new(Order::None) });
    let light = attach(&mut mux);
    let workers = [0; 3].map(|_| mux.clone_worker(1, at(0)));
    mux.handle_bytes(flood, b"1\n2\n3\n4\n", at(0));
    let held = workers.map(|worker| tickets(&mut mux, worker, at(0)));
    assert_eq!(held.each_ref().map(Vec::len), [1, 1, 0], "a worker is kept free");
    assert_eq!((mux.queued(), mux.available()), (2, 0));
    assert!(events(&mut mux).is_empty(), "no worker is woken for messages that it may not have");
    assert_eq!(mux.poll_timeout(), None);

    mux.handle_bytes(light, b"a\n", at(0));
    assert!(matches!(events(&mut mux)[..], [Event::Wake(worker)] if worker == workers[2]));
    assert_eq!(poll(&mut mux, workers[2], at(0)), ["a"]);
    assert!(mux.done(workers[0], held[0][0], at(0)));
    assert_eq!((mux.queued(), mux.available()), (2, 2));
    assert_eq!(poll(&mut mux, workers[0], at(0)), ["3"]);
    mux.check().expect("the counts fit");
}

/// Without a configured limit, a connection leaves a worker free while another one is active, and has all workers otherwise.
#[test]
fn a_connection_leaves_a_worker_free_for_others() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky, Order::Key] {
        // Turns of one message, as with long messages.
        let (mut mux, flood) = lines(Config { batch: 1, ..Config::new(order) });
        let workers = [0; 3].map(|_| mux.clone_worker(1, at(0)));
        let taken = |mux: &mut Mux, now| workers.map(|worker| tickets(mux, worker, at(now)).len());
        let alone = match order {
            Order::Serial | Order::Sticky => [1, 0, 0],
            _ => [1, 1, 1],
        };
        mux.handle_bytes(flood, b"1\n2\n3\n4\n", at(0));
        assert_eq!(taken(&mut mux, 0), alone, "{order:?}: it is alone");

        let light = attach(&mut mux);
        for worker in workers {
            let held: Vec<Ticket> = mux.workers.get(worker).expect("it is there").tickets().collect();
            held.into_iter().for_each(|ticket| assert!(mux.done(worker, ticket, at(0))));
        }
        mux.handle_bytes(flood, b"5\n6\n7\n8\n", at(0));
        let held = taken(&mut mux, 0);
        let shared = if alone == [1, 1, 1] { [1, 1, 0] } else { alone };
        assert_eq!(held, shared, "{order:?}: another connection was attached");
        events(&mut mux);
        mux.handle_bytes(light, b"a\n", at(0));
        assert_eq!(
            taken(&mut mux, 0),
            [0, usize::from(shared[1] == 0), usize::from(shared[1] == 1)],
            "{order:?}"
        );
        mux.check().expect("the counts fit");
        if shared == alone {
            continue;
        }
        // The other connection has been silent for long.
        let later = 2 * in_flight::ACTIVE.as_millis() as u64;
        for (worker, expected) in workers.into_iter().zip([1, 1, 1]) {
            let held: Vec<Ticket> = mux.workers.get(worker).expect("it is there").tickets().collect();
            held.into_iter().for_each(|ticket| assert!(mux.done(worker, ticket, at(later))));
            mux.handle_bytes(flood, b"x\n", at(later));
            assert_eq!(tickets(&mut mux, worker, at(later)).len(), expected, "{order:?}");
        }
        mux.check().expect("the counts fit");
    }
}

/// Short messages go to workers in turns of many: the share is that of all workers but one.
#[test]
fn the_share_of_short_messages_is_the_turns_of_all_workers_but_one() {
    let (mut mux, flood) = lines(Config::new(Order::None));
    attach(&mut mux);
    let workers = [0; 3].map(|_| mux.clone_worker(64, at(0)));
    let time = &mut mux.service_time;
    (time.ewma, time.median, time.floor, time.ewma_slow) = (5_000, 5_000, 5_000, 5_000);
    for _ in 0..5 {
        mux.handle_bytes(flood, &b"x\n".repeat(100), at(0));
    }
    // 200 us of work each.
    let held = workers.map(|worker| tickets(&mut mux, worker, at(0)).len());
    assert_eq!(held, [40, 40, 0]);
    assert_eq!((mux.queued(), mux.available()), (420, 0));
    mux.check().expect("the counts fit");
}

/// A worker that joins may have messages of a connection that was at its limit, and a worker that remains alone has all.
#[test]
fn the_share_follows_the_number_of_workers() {
    let (mut mux, flood) = lines(Config::new(Order::None));
    attach(&mut mux);
    let first = [0; 2].map(|_| mux.clone_worker(1, at(0)));
    mux.handle_bytes(flood, b"1\n2\n3\n4\n5\n", at(0));
    let held = first.map(|worker| tickets(&mut mux, worker, at(0)));
    assert_eq!(held.each_ref().map(Vec::len), [1, 0]);
    let third = mux.clone_worker(1, at(0));
    assert_eq!(tickets(&mut mux, third, at(0)).len(), 1);
    assert_eq!(tickets(&mut mux, first[1], at(0)).len(), 0);
    mux.handle_worker_died(third, at(0));
    mux.leave(first[0], None, at(0));
    assert_eq!(tickets(&mut mux, first[1], at(0)).len(), 1, "it is the only worker");
    mux.check().expect("the counts fit");
}

#[test]
fn a_batch_is_cut_to_the_share() {
    for rows in [false, true] {
        let (mut mux, psock) = lines(Config { in_flight: Some(5), ..Config::new(Order::None) });
        let worker = mux.clone_worker(64, at(0));
        let time = &mut mux.service_time;
        (time.ewma, time.median, time.floor, time.ewma_slow) = (10, 10, 10, 10);
        if rows {
            mux.handle_bytes(psock, &b"x\n".repeat(8), at(0));
            assert_eq!(mux.poll_batches(worker, 64, at(0), &mut Vec::new()), 5);
        } else {
            // More than its share is not given to the worker that read it, but queued.
            let mut buffer = mux.reserve(psock).expect("room");
            buffer.extend(b"x\n".repeat(8));
            assert!(mux.handle_read_by(psock, buffer, worker, at(0)).is_none());
            assert_eq!(poll(&mut mux, worker, at(0)).len(), 5);
        }
        assert_eq!((mux.queued(), mux.available()), (3, 0));
    }
}

/// Number of connections of each worker.
fn connections(mux: &Mux) -> Vec<usize> {
    mux.workers.values().map(|worker| worker.connections).collect()
}

/// A message of each connection; workers process all that they have.
fn round(mux: &mut Mux, psocks: &[psock::Id]) {
    for psock in psocks {
        mux.handle_bytes(*psock, b"x\n", at(0));
    }
    for worker in mux.workers.iter().map(|(id, _)| id).collect::<Vec<_>>() {
        while let [ticket] = tickets(mux, worker, at(0))[..] {
            assert!(mux.done(worker, ticket, at(0)));
        }
    }
    mux.check().expect("the counts fit");
}

#[test]
fn sticky_spreads_connections_over_workers() {
    for rebalance in [None, Some(1)] {
        let mut mux = Mux::new(Config { rebalance, ..Config::new(Order::Sticky) });
        let psocks: Vec<_> = (0..8).map(|_| attach(&mut mux)).collect();
        let workers = [0; 2].map(|_| mux.clone_worker(1, at(0)));
        for psock in &psocks[..6] {
            // One after the other: both workers are idle each time.
            round(&mut mux, &[*psock]);
        }
        assert_eq!(connections(&mux), [3, 3], "not all at the first idle worker");
        mux.clone_worker(1, at(0));
        round(&mut mux, &psocks[..6]);
        // Only new connections go to a worker that joins, or others move between two messages.
        assert_eq!(connections(&mux), if rebalance.is_some() { [2, 2, 2] } else { [3, 3, 0] });
        round(&mut mux, &psocks);
        assert_eq!(connections(&mux), [3, 3, 2]);
        for psock in &psocks[..2] {
            mux.handle_eof(*psock, at(0));
        }
        mux.leave(workers[0], None, at(0));
        events(&mut mux);
        round(&mut mux, &psocks[2..]);
        assert_eq!(connections(&mux).iter().sum::<usize>(), 6);
    }
}

#[test]
fn a_connection_with_a_message_outstanding_stays_with_its_worker() {
    let mut mux = Mux::new(Config { rebalance: Some(1), ..Config::new(Order::Sticky) });
    let psocks = [0; 4].map(|_| attach(&mut mux));
    let busy = mux.clone_worker(64, at(0));
    for psock in psocks {
        mux.handle_bytes(psock, b"1\n", at(0));
    }
    let first = tickets(&mut mux, busy, at(0));
    let idle = mux.clone_worker(64, at(0));
    assert!(poll(&mut mux, idle, at(0)).is_empty());
    mux.handle_bytes(psocks[0], b"2\n", at(0));
    assert!(poll(&mut mux, idle, at(0)).is_empty(), "its first message is not done");
    let mut held = first;
    while let Some(ticket) = held.pop() {
        assert!(mux.done(busy, ticket, at(0)));
        held.extend(tickets(&mut mux, busy, at(0)));
    }
    mux.handle_bytes(psocks[1], b"2\n", at(0));
    assert_eq!(poll(&mut mux, idle, at(0)), ["2"]);
    assert_eq!(connections(&mux), [3, 1]);
}

#[test]
fn sticky_workers_take_turns_over_their_connections() {
    let mut mux = Mux::new(Config::new(Order::Sticky));
    let (flood, light) = (attach(&mut mux), attach(&mut mux));
    let worker = mux.clone_worker(1, at(0));
    mux.handle_bytes(flood, b"1\n2\n3\n", at(0));
    let held = tickets(&mut mux, worker, at(0));
    mux.handle_bytes(light, b"a\n", at(0));
    mux.done(worker, held[0], at(0));
    let mut order = Vec::new();
    while let [ticket] = tickets(&mut mux, worker, at(0))[..] {
        order.push((ticket.psock == light, ticket.number));
        mux.done(worker, ticket, at(0));
    }
    assert_eq!(order, [(false, 1), (true, 0), (false, 2)]);
}

#[test]
fn messages_of_a_reset_connection_are_discarded() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky, Order::Key] {
        let (mut mux, psock) = lines(Config::new(order));
        let other = attach(&mut mux);
        let worker = mux.clone_worker(1, at(0));
        mux.handle_bytes(psock, b"1\n2\n3\n", at(0));
        mux.handle_bytes(other, b"a\n", at(0));
        let held = tickets(&mut mux, worker, at(0));
        mux.handle_error(psock, 104, at(0));
        let ended = end(&mut mux).expect("an end");
        assert_eq!(ended.outstanding, 1, "{order:?}: the one that a worker has");
        assert_eq!((mux.totals().discarded_reset, mux.queued()), (2, 1), "{order:?}");
        mux.check().expect("the counts fit");
        // A message that the worker has not begun comes back, and is discarded, too.
        mux.handle_hand_back(worker, &held, at(0));
        assert_eq!((mux.totals().discarded_reset, mux.totals().handed_back), (3, 0), "{order:?}");
        assert_eq!(poll(&mut mux, worker, at(0)), ["a"], "{order:?}");
        assert!(mux.status(psock).is_none(), "{order:?}: it has gone");
        mux.check().expect("the counts fit");
    }
}

#[test]
fn a_discarded_message_frees_its_key() {
    let framing: crate::framing::Framing = "length=1 adjust=1 key=1:1".parse().expect("a framing");
    let mut mux = Mux::new(Config::new(Order::Key));
    let [one, two] = [0; 2].map(|_| mux.attach(framing.clone(), Limits::default(), at(0)).expect("open"));
    let worker = mux.clone_worker(1, at(0));
    // The first message waits for a worker, the others for the first.
    mux.handle_bytes(one, b"\x02ka\x02kb", at(0));
    mux.handle_bytes(two, b"\x02kc", at(0));
    mux.handle_error(one, 104, at(0));
    assert_eq!((mux.totals().discarded_reset, mux.queued()), (2, 1));
    assert_eq!(poll(&mut mux, worker, at(0)), ["\u{2}kc"]);
    assert!(mux.status(one).is_none());
    mux.check().expect("the counts fit");
}
