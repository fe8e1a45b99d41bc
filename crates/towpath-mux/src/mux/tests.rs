//! The harness under random, simulated and all small runs; and what each bound, timer and end does, one by one.

use std::time::Duration;

use proptest::prelude::*;

use super::world::{Op, World};
use super::*;
use crate::assembler::Limits;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn any_operations_keep_the_promises(kind in any::<u8>(), ops in prop::collection::vec(any::<Op>(), 0..120)) {
        World::run(kind, ops);
    }
}

/// One run of the simulation: what happens follows from the seed. xorshift64* (Vigna 2016).
fn simulate(seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    };
    let kind = next() as u8;
    let length = next() % 200;
    // Somebody to talk to, and somebody to work, first.
    let start: [Op; 4] = [[0, 0, 0], [6, 0, 4], [0, 0, 0], [6, 0, 0]];
    let ops = (0..length).map(|_| {
        let [act, whom, much, ..] = next().to_le_bytes();
        [act, whom, much]
    });
    World::run(kind, start.into_iter().chain(ops));
}

/// `TOWPATH_SEEDS` says how many worlds, `TOWPATH_SEED` which one comes first.
#[test]
fn simulation() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let (first, count) = (number("TOWPATH_SEED").unwrap_or(1), number("TOWPATH_SEEDS").unwrap_or(5000));
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for seed in (first + thread..first + count).step_by(threads as usize) {
                    if let Err(panic) = std::panic::catch_unwind(|| simulate(seed)) {
                        eprintln!("that was TOWPATH_SEED={seed} TOWPATH_SEEDS=1");
                        std::panic::resume_unwind(panic);
                    }
                }
            });
        }
    });
}

/// Every sequence of four operations of each order, on one connection and one worker that have begun.
#[test]
fn every_small_case() {
    const OPS: [Op; 15] = [
        [0, 0, 0],
        [1, 0, 11],
        [2, 0, 0],
        [3, 0, 0],
        [4, 0, 0],
        [5, 0, 0],
        [6, 0, 4],
        [7, 0, 0],
        [8, 0, 0],
        [9, 0, 1],
        [10, 0, 0],
        [11, 0, 0],
        [13, 0, 0],
        [14, 0, 9],
        [16, 0, 3],
    ];
    let start: [Op; 4] = [[0, 0, 0], [6, 0, 4], [1, 0, 30], [10, 0, 0]];
    let count = OPS.len().pow(4);
    for kind in 0..10 {
        for case in 0..count {
            let ops = (0..4).map(|at| OPS[case / OPS.len().pow(at) % OPS.len()]);
            World::run(kind, start.into_iter().chain(ops));
        }
    }
}

fn at(millis: u64) -> Time {
    Time::from_secs(1) + Duration::from_millis(millis)
}

fn lines(config: Config) -> (Mux, psock::Id) {
    let mut mux = Mux::new(config);
    let psock = attach(&mut mux);
    (mux, psock)
}

fn attach(mux: &mut Mux) -> psock::Id {
    let limits = Limits {
        message: 1 << 16,
        head_time: Some(Duration::from_millis(100)),
        body_time: Some(Duration::from_millis(100)),
        ..Limits::default()
    };
    mux.attach("line".parse().expect("a framing"), limits, at(0)).expect("it does not drain")
}

fn poll(mux: &mut Mux, worker: worker::Id, now: Time) -> Vec<String> {
    let mut batch = Vec::new();
    mux.poll_batch(worker, now, &mut batch);
    batch.iter().map(|message| String::from_utf8_lossy(message.payload()).into_owned()).collect()
}

/// What the mux says, but for what sockets wait for.
fn events(mux: &mut Mux) -> Vec<Event> {
    let events = std::iter::from_fn(|| mux.poll_event());
    events.filter(|event| !matches!(event, Event::Interest(_))).collect()
}

fn end(mux: &mut Mux) -> Option<End> {
    events(mux).into_iter().find_map(|event| match event {
        Event::Ended(end) => Some(end),
        _ => None,
    })
}

fn tickets(mux: &mut Mux, worker: worker::Id, now: Time) -> Vec<Ticket> {
    let mut batch = Vec::new();
    mux.poll_batch(worker, now, &mut batch);
    batch.iter().map(Message::ticket).collect()
}

/// The fault of KCM's that matters most: 154 of 400 messages waited behind a worker that did not read.
#[test]
fn a_message_does_not_wait_behind_a_busy_worker() {
    let (mut mux, psock) = lines(Config::default());
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
    let (mut mux, psock) = lines(Config { wake_cost: Duration::ZERO, ..Config::default() });
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
    let (mut mux, psock) = lines(Config::default());
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

/// One in fifty takes 20 ms: who begins the next such one has been replaced, though those before took next to nothing.
#[test]
fn a_slow_message_is_remembered_while_fast_ones_follow() {
    let (mut mux, psock) = lines(Config::default());
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
    assert!(mux.mean_service_time() < cost, "batches have forgotten it");
    assert!(mux.wary_service_time() > cost);
}

#[test]
fn what_a_slow_worker_has_not_begun_is_recalled() {
    let (mut mux, psock) = lines(Config::default());
    let slow = mux.clone_worker(64, at(0));
    mux.mean = 100;
    mux.handle_bytes(psock, b"a\nb\nc\n", at(0));
    let batch = tickets(&mut mux, slow, at(0));
    assert_eq!(batch.len(), 3);
    let idle = mux.clone_worker(64, at(0));
    assert!(poll(&mut mux, idle, at(0)).is_empty());
    assert!(events(&mut mux).is_empty(), "it may be done sooner than anybody is woken");
    assert_eq!(mux.poll_timeout(), Some(at(1)));
    mux.handle_timeout(at(1));
    assert!(matches!(events(&mut mux)[..], [Event::Recall(worker)] if worker == slow));
    mux.handle_hand_back(slow, &batch[1..], at(1));
    assert!(matches!(events(&mut mux)[..], [Event::Wake(worker)] if worker == idle));
    assert_eq!(poll(&mut mux, idle, at(1)), ["b", "c"]);
}

#[test]
fn who_is_woken_and_does_not_come_is_passed_over() {
    let (mut mux, psock) = lines(Config::default());
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
    assert_eq!(woken(&mut mux), [workers[1]], "its thread is at something else");
    assert_eq!(mux.poll_timeout(), None, "all were told who are to be");
    mux.handle_timeout(at(10));
    assert!(woken(&mut mux).is_empty());
    assert_eq!(poll(&mut mux, workers[1], at(10)), ["a"]);
    // It comes after all.
    assert_eq!(poll(&mut mux, workers[0], at(11)), ["b"]);
    assert!(mux.check().is_ok());
}

/// Nobody comes who could take what waits, or what a worker has not begun: to look for somebody again and again is in vain.
#[test]
fn nothing_is_due_that_nobody_would_do() {
    for order in [Order::None, Order::Sticky] {
        let (mut mux, psock) = lines(Config { order, ..Config::default() });
        let (busy, idle) = (mux.clone_worker(64, at(0)), mux.clone_worker(64, at(0)));
        mux.mean = 100;
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
fn ends_and_their_causes() {
    let row = |mux: &mut Mux, cause: &str, errno: i32| {
        let end = end(mux).unwrap_or_else(|| panic!("no end; expected {cause}"));
        assert_eq!(end.cause.to_string(), cause);
        assert_eq!(end.cause.errno(), errno);
        mux.check().expect("the counts fit");
        end
    };
    let (mut mux, psock) = lines(Config::default());
    mux.handle_eof(psock, at(0));
    row(&mut mux, "closed by the peer", 0);

    let psock = attach(&mut mux);
    mux.handle_bytes(psock, b"abc", at(0));
    mux.handle_eof(psock, at(0));
    row(&mut mux, "closed by the peer inside a message: 3 bytes, its length not known yet", 74);

    let psock = attach(&mut mux);
    mux.handle_bytes(psock, b"abc", at(0));
    assert_eq!(mux.poll_timeout(), Some(at(100)));
    mux.handle_timeout(at(100));
    row(&mut mux, "at byte 0: ETIMEDOUT: the message's length did not arrive in time (61 62 63)", 110);
    assert_eq!(mux.totals().psocks.rx_msg_timeouts, 1);

    let psock = attach(&mut mux);
    mux.handle_bytes(psock, &[b'x'; 1 << 17], at(200));
    row(
        &mut mux,
        &format!("at byte 0: EMSGSIZE: no end of the message within 65536 bytes ({}78)", "78 ".repeat(31)),
        90,
    );
    assert_eq!(mux.totals().psocks.rx_msg_too_big, 1);

    let psock = attach(&mut mux);
    mux.handle_error(psock, 104, at(200));
    row(&mut mux, "Connection reset by peer (os error 104)", 104);

    // What was asked before the end is answered before it.
    let psock = attach(&mut mux);
    let worker = mux.clone_worker(1, at(200));
    mux.handle_bytes(psock, b"one\ntwo\n", at(200));
    mux.handle_eof(psock, at(200));
    assert!(end(&mut mux).is_none());
    for _ in 0..2 {
        let ticket = tickets(&mut mux, worker, at(200))[0];
        mux.reply(worker, ticket, &b"yes\n"[..], at(200)).expect("it is there");
        mux.done(worker, ticket, at(200));
    }
    assert!(end(&mut mux).is_none());
    let mut transmit = mux.transmit(psock).expect("two answers");
    transmit.advance(8);
    mux.handle_transmitted(transmit, Outcome::Taken, at(200));
    assert_eq!(row(&mut mux, "closed by the peer", 0).unsent, 0);
    assert_eq!(mux.bytes(), 0);
}

#[test]
fn a_full_connection_is_not_read_until_half_is_done() {
    let charge = 2 + size_of::<Message>();
    let bound = Bound { high: 4 * charge, low: 2 * charge };
    let (mut mux, psock) = lines(Config { psock_bytes: bound, ..Config::default() });
    let worker = mux.clone_worker(1, at(0));
    mux.handle_bytes(psock, &b"x\n".repeat(4), at(0));
    assert!(!mux.interest(psock).read);
    assert_eq!(mux.handle_bytes(psock, b"x\n", at(0)), 0);
    for (done, read) in [(1, false), (2, true), (3, true)] {
        let ticket = tickets(&mut mux, worker, at(0))[0];
        mux.done(worker, ticket, at(0));
        assert_eq!(mux.interest(psock).read, read, "{done} of 4 done");
    }
}

#[test]
fn a_peer_that_takes_nothing_costs_itself_only() {
    let config = Config { send_bytes: Bound::of(8), send_most: 64, ..Config::default() };
    let (mut mux, psock) = lines(config);
    let other = attach(&mut mux);
    let worker = mux.clone_worker(1, at(0));
    let answer = |mux: &mut Mux, bytes: usize, now| {
        let ticket = tickets(mux, worker, now)[0];
        let sent = mux.reply(worker, ticket, vec![b'y'; bytes], now);
        mux.done(worker, ticket, now);
        sent
    };
    mux.handle_bytes(psock, b"a\nb\nc\n", at(0));
    answer(&mut mux, 10, at(0)).expect("it is there");
    assert!(!mux.interest(psock).read, "it is not read any more");
    let mut transmit = mux.transmit(psock).expect("an answer");
    transmit.advance(3);
    mux.handle_transmitted(transmit, Outcome::Blocked, at(0));
    assert!(mux.interest(psock).write);
    assert!(mux.transmit(psock).is_none(), "the socket takes no more");
    answer(&mut mux, 10, at(1)).expect("it may wait");

    // Nothing is taken for a minute.
    assert_eq!(mux.poll_timeout(), Some(at(60_000)));
    mux.handle_timeout(at(60_000));
    let ended = end(&mut mux).expect("an end");
    assert_eq!((ended.cause, ended.unsent, ended.outstanding), (Cause::SendTimeout, 2, 1));
    assert_eq!(mux.totals().unsent, 2);
    assert_eq!(answer(&mut mux, 1, at(60_000)), Err(SendError::Gone));
    assert_eq!(mux.totals().unsent, 3, "one that was made behind the end");

    // More than may wait at all; one alone may.
    mux.handle_bytes(other, b"a\nb\n", at(60_000));
    answer(&mut mux, 65, at(60_000)).expect("it is there");
    assert!(end(&mut mux).is_none());
    answer(&mut mux, 1, at(60_000)).expect("it is there when it is answered");
    assert_eq!(end(&mut mux).expect("an end").cause, Cause::SendFull);
    assert_eq!((mux.totals().send_timeouts, mux.totals().send_full), (1, 1));
    assert_eq!(mux.bytes(), 0);
}

/// A block that several answers were copied into, as whoever reads workers' answers makes them; and whether it is still there.
fn share(bytes: &'static [u8]) -> (bytes::Bytes, std::sync::Weak<[u8]>) {
    let block: std::sync::Arc<[u8]> = [bytes, &[0; 60_000]].concat().into();
    let there = std::sync::Arc::downgrade(&block);
    (bytes::Bytes::from_owner(block).slice(..bytes.len()), there)
}

#[test]
fn what_waits_for_a_peer_or_another_answer_keeps_its_own_bytes_only() {
    let (mut mux, psock) = lines(Config::default());
    let worker = mux.clone_worker(1, at(0));
    let answer = |mux: &mut Mux, bytes: &'static [u8]| {
        let (shared, there) = share(bytes);
        mux.handle_bytes(psock, b"a\n", at(0));
        let ticket = tickets(mux, worker, at(0))[0];
        mux.reply(worker, ticket, shared, at(0)).expect("it is there");
        mux.done(worker, ticket, at(0));
        there
    };
    let first = answer(&mut mux, b"one");
    let mut transmit = mux.transmit(psock).expect("an answer");
    // Answered while somebody writes, and while the socket takes no more.
    let second = answer(&mut mux, b"two");
    transmit.advance(2);
    assert!(first.upgrade().is_some() && second.upgrade().is_some(), "nothing is copied without need");
    mux.handle_transmitted(transmit, Outcome::Blocked, at(0));
    let third = answer(&mut mux, b"three");
    for there in [first, second, third] {
        assert!(there.upgrade().is_none());
    }
    mux.handle_writable(psock, at(1));
    let mut transmit = mux.transmit(psock).expect("the rest");
    assert_eq!(transmit.slices().collect::<Vec<_>>().concat(), b"etwothree");

    let (mut mux, psock) = lines(Config { order: Order::Replies, ..Config::default() });
    let workers = [mux.clone_worker(1, at(0)), mux.clone_worker(1, at(0))];
    mux.handle_bytes(psock, b"a\nb\n", at(0));
    let [slow, fast] = workers.map(|worker| tickets(&mut mux, worker, at(0))[0]);
    let (shared, there) = share(b"two");
    mux.reply(workers[1], fast, shared, at(0)).expect("it is there");
    assert!(there.upgrade().is_none(), "it waits for the other one's");
    mux.reply(workers[0], slow, &b"one"[..], at(0)).expect("it is there");
    mux.done(workers[0], slow, at(0));
    mux.done(workers[1], fast, at(0));
    let mut transmit = mux.transmit(psock).expect("both");
    assert_eq!(transmit.slices().collect::<Vec<_>>().concat(), b"onetwo");
}

#[test]
fn a_full_mux_reads_nothing_and_drops_who_holds_most() {
    let (mut mux, small) = lines(Config { mux_bytes: Bound::of(150_000), ..Config::default() });
    let big = attach(&mut mux);
    mux.handle_bytes(small, &[b'x'; 20_000], at(0));
    mux.handle_bytes(big, &[b'x'; 30_000], at(0));
    assert!(end(&mut mux).is_none(), "a read's room each");
    let third = attach(&mut mux);
    assert_eq!(mux.handle_bytes(big, &[b'x'; 5000], at(0)), 5000);
    assert_eq!(end(&mut mux).map(|end| (end.psock, end.cause)), Some((big, Cause::Memory)));
    assert!(mux.interest(small).read && mux.interest(third).read);
}

/// What is not whole fills the mux while a worker has a message, which may take for ever: nobody waits for that.
#[test]
fn a_mux_that_filled_up_during_a_message_goes_on_beside_it() {
    let (mut mux, small) = lines(Config { mux_bytes: Bound::of(100_000), ..Config::default() });
    let worker = mux.clone_worker(1, at(0));
    mux.handle_bytes(small, b"a\n", at(0));
    tickets(&mut mux, worker, at(0));
    let many = [attach(&mut mux), attach(&mut mux)];
    for psock in many.iter().cycle().take(8) {
        mux.handle_bytes(*psock, &[b'x'; 15_000], at(0));
    }
    assert!(mux.is_full());
    assert_eq!(end(&mut mux).map(|end| end.cause), Some(Cause::Memory));
    assert!(mux.interest(small).read && !mux.is_full());
    mux.check().expect("everything is counted");
}

/// Whole messages fill it: workers make room, as much as is needed beside what is not whole.
#[test]
fn a_mux_that_messages_fill_waits_for_workers() {
    let config =
        Config { mux_bytes: Bound::of(100_000), psock_bytes: Bound::of(90_000), ..Config::default() };
    let (mut mux, psock) = lines(config);
    let worker = mux.clone_worker(1, at(0));
    let other = attach(&mut mux);
    mux.handle_bytes(other, &[b'x'; 15_000], at(0));
    while !mux.is_full() {
        mux.handle_bytes(psock, &[&[b'x'; 10_000][..], b"\n"].concat(), at(0));
    }
    assert!(end(&mut mux).is_none());
    while mux.is_full() {
        let ticket = tickets(&mut mux, worker, at(0))[0];
        mux.done(worker, ticket, at(0));
    }
    assert!(end(&mut mux).is_none() && mux.interest(other).read);
}

/// The time in which a peer has to take something begins when there is something that it could take.
#[test]
fn answers_that_wait_for_an_earlier_one_are_not_the_peers_to_take() {
    let (mut mux, psock) = lines(Config { order: Order::Replies, ..Config::default() });
    let workers = [mux.clone_worker(1, at(0)), mux.clone_worker(1, at(0))];
    mux.handle_bytes(psock, b"a\nb\nc\n", at(0));
    let [slow, fast] = workers.map(|worker| tickets(&mut mux, worker, at(0))[0]);
    mux.reply(workers[1], fast, &b"two"[..], at(0)).expect("it is there");
    mux.done(workers[1], fast, at(0));
    let last = tickets(&mut mux, workers[1], at(0))[0];
    mux.reply(workers[1], last, &b"three"[..], at(0)).expect("it is there");
    let late = 61_000;
    mux.handle_timeout(at(late));
    mux.reply(workers[0], slow, &b"one"[..], at(late)).expect("it is there");
    mux.handle_timeout(at(late));
    assert!(end(&mut mux).is_none(), "the first answer was not there before");
    let mut transmit = mux.transmit(psock).expect("the first answer");
    transmit.advance(3);
    mux.handle_transmitted(transmit, Outcome::Taken, at(late));
    mux.done(workers[0], slow, at(2 * late));
    mux.handle_timeout(at(2 * late));
    assert!(end(&mut mux).is_none(), "nor could the others leave");
    mux.handle_timeout(at(2 * late + 60_000));
    assert_eq!(end(&mut mux).map(|end| end.cause), Some(Cause::SendTimeout), "it takes nothing");
}

#[test]
fn who_came_while_the_mux_was_full_is_read_when_there_is_room() {
    let (mut mux, psock) = lines(Config { mux_bytes: Bound::of(4000), ..Config::default() });
    let worker = mux.clone_worker(64, at(0));
    mux.handle_bytes(psock, &b"x\n".repeat(60), at(0));
    assert!(mux.is_full());
    let late = attach(&mut mux);
    assert_eq!(mux.handle_bytes(late, b"a\n", at(0)), 0);
    assert!(events(&mut mux).iter().all(|event| !matches!(event, Event::Ended(_))));
    while mux.is_full() {
        for ticket in tickets(&mut mux, worker, at(0)) {
            mux.done(worker, ticket, at(0));
        }
    }
    let told = std::iter::from_fn(|| mux.poll_event());
    assert!(told.into_iter().any(|event| matches!(event, Event::Interest(id) if id == late)));
    assert!(mux.interest(late).read);
}

#[test]
fn timers_of_connections_that_have_gone_are_not_kept() {
    let (mut mux, psock) = lines(Config { idle: Some(Duration::from_secs(86_400)), ..Config::default() });
    for _ in 0..5000 {
        let psock = attach(&mut mux);
        mux.handle_eof(psock, at(0));
    }
    assert_eq!(mux.totals().unattach, 5000);
    assert!(mux.timers.len() <= 1100, "{}", mux.timers.len());
    assert_eq!(mux.poll_timeout(), Some(at(86_400_000)), "that of the one that is there is");
    assert!(events(&mut mux).iter().all(|event| matches!(event, Event::Ended(end) if end.psock != psock)));
    mux.handle_timeout(at(86_400_000));
    assert_eq!(end(&mut mux).map(|end| (end.psock, end.cause)), Some((psock, Cause::Idle)));
    assert_eq!(mux.totals().idle, 1);
}

#[test]
fn a_connection_goes_back_with_what_was_read() {
    let mut mux = Mux::new(Config::default());
    let framing = r#"when 01 (fixed=2) when 16 03 (giveback)"#.parse().expect("a framing");
    let psock = mux.attach(framing, Limits::default(), at(0)).expect("it does not drain");
    let worker = mux.clone_worker(1, at(0));
    mux.handle_bytes(psock, b"\x01a\x16\x03\x01", at(0));
    assert!(end(&mut mux).is_none(), "a message is not answered yet");
    let ticket = tickets(&mut mux, worker, at(0))[0];
    mux.done(worker, ticket, at(0));
    let end = end(&mut mux).expect("an end");
    assert_eq!((end.cause, end.hand_back, &end.rest[..]), (Cause::GivenBack, true, &b"\x16\x03\x01"[..]));

    let psock = attach(&mut mux);
    mux.handle_bytes(psock, b"whole\nhal", at(0));
    mux.unattach(psock, None, at(0));
    assert_eq!(mux.totals().unattach_rsvd, 1);
    let ticket = tickets(&mut mux, worker, at(0))[0];
    mux.done(worker, ticket, at(0));
    let end = super::tests::end(&mut mux).expect("an end");
    assert_eq!((end.cause, end.hand_back, &end.rest[..]), (Cause::Unattached, true, &b"hal"[..]));
}

#[test]
fn draining_waits_for_answers_until_its_deadline() {
    let (mut mux, psock) = lines(Config::default());
    let worker = mux.clone_worker(1, at(0));
    mux.handle_bytes(psock, b"a\n", at(0));
    let ticket = tickets(&mut mux, worker, at(0))[0];
    mux.drain(Some(at(50)), at(0));
    assert!(mux.attach("line".parse().expect("a framing"), Limits::default(), at(0)).is_err());
    assert!(end(&mut mux).is_none());
    assert_eq!(mux.poll_timeout(), Some(at(50)));
    mux.handle_timeout(at(50));
    assert_eq!(end(&mut mux).expect("an end").cause, Cause::DrainTimeout);
    mux.done(worker, ticket, at(51));
    mux.leave(worker, None, at(51));
    let left = events(&mut mux);
    assert!(matches!(left[..], [Event::Left(_), Event::Drained]), "{left:?}");
}

#[test]
fn a_worker_that_kills_workers_is_given_up() {
    let (mut mux, psock) = lines(Config { redeliver: 1, ..Config::default() });
    mux.handle_bytes(psock, b"poison\nfine\n", at(0));
    for deaths in 0..2 {
        let worker = mux.clone_worker(1, at(0));
        let mut batch = Vec::new();
        mux.poll_batch(worker, at(0), &mut batch);
        assert_eq!((batch[0].payload(), batch[0].deaths()), (&b"poison"[..], deaths));
        mux.handle_worker_died(worker, at(0));
        assert!(!mux.done(worker, batch[0].ticket(), at(0)), "the dead do nothing");
        assert_eq!(mux.reply(worker, batch[0].ticket(), &b"x"[..], at(0)), Err(SendError::Gone));
    }
    let undone = events(&mut mux);
    assert!(matches!(&undone[..], [Event::Undone(message)] if message.payload() == b"poison"), "{undone:?}");
    let worker = mux.clone_worker(1, at(0));
    assert_eq!(poll(&mut mux, worker, at(0)), ["fine"]);
}

#[test]
fn connected_mode_chooses_the_least_and_says_when_all_are_full() {
    let config = Config { connected: true, send_bytes: Bound::of(4), ..Config::default() };
    let mut mux = Mux::new(config);
    assert_eq!(mux.send(&b"x"[..], at(0)), Err(SendError::NotConnected));
    let (one, two) = (attach(&mut mux), attach(&mut mux));
    let first = mux.send(&b"abcd"[..], at(0)).expect("room");
    let second = mux.send(&b"ab"[..], at(0)).expect("room");
    assert_ne!(first, second);
    assert_eq!(mux.send(&b"cd"[..], at(0)), Ok(second));
    assert_eq!(mux.send(&b"e"[..], at(0)), Err(SendError::Full));

    // Two bytes of the first message left, and none of the others: those go on, it comes back.
    let mut transmit = mux.transmit(first).expect("a message");
    transmit.advance(2);
    mux.handle_transmitted(transmit, Outcome::Blocked, at(0));
    mux.handle_error(first, 104, at(0));
    let undelivered = events(&mut mux)
        .into_iter()
        .find_map(|event| match event {
            Event::Undelivered(undelivered) => Some(undelivered),
            _ => None,
        })
        .expect("it comes back");
    assert_eq!((&undelivered.bytes[..], undelivered.left), (&b"abcd"[..], 2));
    mux.handle_error(second, 104, at(0));
    let back = events(&mut mux).iter().filter(|event| matches!(event, Event::Undelivered(_))).count();
    assert_eq!(back, 2, "nobody is left");
    let _ = (one, two);
}

#[test]
fn messages_share_the_buffer_that_they_were_read_into() {
    let (mut mux, psock) = lines(Config { read: 64, ..Config::default() });
    let worker = mux.clone_worker(64, at(0));
    mux.mean = 1;
    let mut buffer = mux.reserve(psock).expect("it is read");
    let start = buffer.as_ptr().addr();
    buffer.extend_from_slice(&b"0123456\n".repeat(6));
    buffer.extend_from_slice(b"89");
    mux.handle_read(psock, buffer, at(0));
    let mut batch = Vec::new();
    mux.poll_batch(worker, at(0), &mut batch);
    let places: Vec<_> = batch.iter().map(|message| message.bytes().as_ptr().addr() - start).collect();
    assert_eq!(places, [0, 8, 16, 24, 32, 40]);
    assert_eq!(mux.psocks[psock].assembler.held(), 2);
}

/// What a mux of this order comes to when its worker answers four lines, and does them: as rows, or one by one.
fn four_lines(order: Order, rows: bool) -> impl PartialEq + std::fmt::Debug {
    let (mut mux, psock) = lines(Config { order, ..Config::default() });
    let worker = mux.clone_worker(64, at(0));
    mux.handle_bytes(psock, b"1\n2\n3\n4\n", at(0));
    let mut written: Vec<u8> = Vec::new();
    while mux.totals().done < 4 {
        let held = tickets(&mut mux, worker, at(0));
        let mut answers = held.iter().map(|ticket| ticket.number.to_string());
        if rows {
            let (first, count) = (held[0], held.len() as u32);
            let bytes = bytes::Bytes::from(answers.collect::<String>());
            mux.together(|mux| {
                mux.reply_row(worker, (first, count), count, bytes, at(0)).expect("it holds them");
                assert_eq!(mux.done_row(worker, (first, count), at(0)), count);
            });
            assert_eq!(mux.done_row(worker, (first, count), at(0)), 0, "done once");
            assert!(mux.reply_row(worker, (first, count), 1, bytes::Bytes::new(), at(0)).is_err());
        } else {
            for (ticket, bytes) in held.iter().zip(answers.by_ref()) {
                mux.reply(worker, *ticket, bytes, at(0)).expect("it holds it");
                assert!(mux.done(worker, *ticket, at(0)));
            }
        }
        if let Some(mut transmit) = mux.transmit(psock) {
            let before = written.len();
            written.extend(transmit.slices().flatten().copied());
            transmit.advance(written.len() - before);
            mux.handle_transmitted(transmit, Outcome::Taken, at(0));
        }
    }
    mux.check().expect("it counted right");
    (written, format!("{:?}", mux.show()))
}

#[test]
fn rows_come_to_what_their_messages_come_to() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky, Order::Key] {
        assert_eq!(four_lines(order, true), four_lines(order, false), "{order:?}");
    }
}

#[test]
fn what_is_left_of_a_row_when_its_worker_dies_goes_to_another() {
    let (mut mux, psock) = lines(Config::default());
    let worker = mux.clone_worker(64, at(0));
    // Two that were short, so that a turn has several.
    for _ in 0..2 {
        mux.handle_bytes(psock, b"short\n", at(0));
        let held = tickets(&mut mux, worker, at(0));
        assert_eq!(mux.done_row(worker, (held[0], 1), at(0)), 1);
    }
    mux.handle_bytes(psock, b"1\n2\n3\n4\n", at(0));
    let held = tickets(&mut mux, worker, at(0));
    assert_eq!(held.len(), 4);
    mux.reply_row(worker, (held[0], 2), 2, bytes::Bytes::from_static(b"12"), at(0)).expect("it holds them");
    mux.handle_worker_died(worker, at(0));
    assert_eq!((mux.totals().done, mux.totals().redelivered), (4, 2));
    let other = mux.clone_worker(64, at(0));
    assert_eq!(poll(&mut mux, other, at(0)), ["3", "4"]);
}

#[test]
fn one_answer_to_what_came_alone_and_what_came_together_answers_all() {
    let (mut mux, psock) = lines(Config::default());
    let worker = mux.clone_worker(64, at(0));
    // Short ones: a turn has several.
    (mux.mean, mux.typical) = (1, 1);
    let mut rows = Vec::new();
    for read in [&b"1\n"[..], b"2\n3\n", b"4\n", b"5\n6\n"] {
        mux.handle_bytes(psock, read, at(0));
        mux.poll_rows(worker, 64, at(0), &mut rows);
    }
    let first = rows[0].first().expect("a message");
    let all: usize = rows.iter().map(|run| run.views().count()).sum();
    assert_eq!((rows.len(), all), (4, 6));
    mux.reply_row(worker, (first, 6), 1, bytes::Bytes::from_static(b"x"), at(0)).expect("it holds them");
    mux.handle_worker_died(worker, at(0));
    assert_eq!((mux.totals().done, mux.totals().redelivered), (6, 0));
    mux.check().expect("it counted right");
}

#[test]
fn ends_are_counted_by_their_cause() {
    let mut mux = Mux::new(Config::default());
    let attach = |mux: &mut Mux, framing: &str| {
        mux.attach(framing.parse().expect("a framing"), Limits::default(), at(0)).expect("it does not drain")
    };
    let counted = |mux: &Mux| [mux.totals().resets, mux.totals().inside, mux.totals().malformed];
    let reset = attach(&mut mux, "line");
    mux.handle_error(reset, 104, at(0));
    assert_eq!(counted(&mux), [1, 0, 0]);
    let inside = attach(&mut mux, "line");
    mux.handle_bytes(inside, b"hal", at(0));
    mux.handle_eof(inside, at(0));
    assert_eq!(counted(&mux), [1, 1, 0]);
    let malformed = attach(&mut mux, "netstring");
    mux.handle_bytes(malformed, b"no length", at(0));
    assert_eq!(counted(&mux), [1, 1, 1]);
    let too_big = attach(&mut mux, "offset=0 length=1 max=4");
    mux.handle_bytes(too_big, b"\x09", at(0));
    assert_eq!(mux.show().psock_totals.rx_msg_too_big, 1, "that has a name of its own");
    let clean = attach(&mut mux, "line");
    mux.handle_eof(clean, at(0));
    assert_eq!(counted(&mux), [1, 1, 1]);
}

#[test]
fn what_a_worker_sent_is_counted_as_its_connections_do() {
    let (mut mux, psock) = lines(Config { connected: true, ..Config::default() });
    let worker = mux.clone_worker(2, at(0));
    mux.handle_bytes(psock, b"a\nb\n", at(0));
    for answer in [&b"answer"[..], b""] {
        let ticket = tickets(&mut mux, worker, at(0))[0];
        mux.reply(worker, ticket, answer, at(0)).expect("it holds it");
        mux.done(worker, ticket, at(0));
    }
    mux.send(&b"unasked"[..], at(0)).expect("room");
    mux.count_sent(worker, 7);
    let mut transmit = mux.transmit(psock).expect("answers");
    transmit.advance(13);
    mux.handle_transmitted(transmit, Outcome::Taken, at(0));
    let show = mux.show();
    let (worker, psock) = (show.workers[0].stats, show.psocks[0].stats);
    assert_eq!((worker.tx_msgs, worker.tx_bytes), (2, 13));
    assert_eq!((psock.tx_msgs, psock.tx_bytes), (2, 13));
}

#[test]
fn a_row_is_parted_where_something_is_said_about_some_of_it() {
    // What is said, from which message on and about how many; what there is to be done again when the worker dies then.
    enum Say {
        Answered,
        Done,
    }
    use Say::{Answered, Done};
    type Case<'a> = (&'a [(Say, usize, u32)], &'a [&'a str]);
    let rows: [Case<'_>; 8] = [
        (&[], &["1", "2", "3", "4", "5", "6"]),
        (&[(Answered, 0, 2)], &["3", "4", "5", "6"]),
        (&[(Answered, 0, 2), (Answered, 1, 3)], &["5", "6"]),
        (&[(Answered, 2, 2)], &["1", "2", "5", "6"]),
        (&[(Answered, 0, 4), (Done, 0, 2)], &["5", "6"]),
        (&[(Done, 2, 2)], &["1", "2", "5", "6"]),
        (&[(Done, 2, 2), (Done, 1, 1), (Answered, 4, 9)], &["1"]),
        (&[(Answered, 1, 4), (Done, 3, 1), (Done, 0, 9)], &[]),
    ];
    for (number, (said, again)) in rows.into_iter().enumerate() {
        let (mut mux, psock) = lines(Config::default());
        let worker = mux.clone_worker(64, at(0));
        (mux.mean, mux.typical) = (1, 1);
        mux.handle_bytes(psock, b"1\n2\n3\n4\n5\n6\n", at(0));
        let mut rows = Vec::new();
        assert_eq!(mux.poll_rows(worker, 2, at(0), &mut rows), 2, "no more than it may have");
        assert_eq!(mux.poll_rows(worker, 64, at(0), &mut rows), 4, "and what is left");
        assert_eq!(
            rows.iter().map(|row| row.bytes(9)).collect::<Vec<_>>(),
            [&b"1\n2\n"[..], b"3\n4\n5\n6\n"]
        );
        let held: Vec<Ticket> = rows.iter().flat_map(Run::rest).collect();
        for (say, first, count) in said {
            let row = (held[*first], *count);
            match say {
                Answered => {
                    mux.reply_row(worker, row, 1, bytes::Bytes::from_static(b"x"), at(0)).expect("there")
                }
                Done => assert!(mux.done_row(worker, row, at(0)) > 0),
            }
            mux.check().unwrap_or_else(|wrong| panic!("row {number}: {wrong}"));
        }
        mux.handle_worker_died(worker, at(0));
        mux.check().unwrap_or_else(|wrong| panic!("row {number}: {wrong}"));
        let other = mux.clone_worker(64, at(0));
        assert_eq!(poll(&mut mux, other, at(0)), again, "row {number}");
    }
}

#[test]
fn short_ones_of_a_run_are_counted_from_the_first_that_is_not_begun() {
    let (mut mux, psock) = lines(Config::default());
    let worker = mux.clone_worker(64, at(0));
    (mux.mean, mux.typical) = (1, 1);
    let mut rows = Vec::new();
    mux.handle_bytes(psock, b"begun\na\nbbbb\nc\ndd\n", at(0));
    mux.poll_rows(worker, 64, at(0), &mut rows);
    let run = &mut rows[0];
    run.skip(1);
    // At most so many, each of so many bytes, and so many together.
    let cases = [
        (9, 9, 99, 4),
        (9, 5, 12, 4),
        (9, 5, 11, 3),
        (2, 9, 99, 2),
        (0, 9, 99, 0),
        (9, 4, 99, 1),
        (9, 1, 99, 0),
        (9, 9, 7, 2),
        (9, 9, 6, 1),
    ];
    for (most, each, bytes, expected) in cases {
        assert_eq!(run.short(most, each, bytes), expected, "{most} of {each}, {bytes}");
    }
}
