//! Opened events, and connections that workers close and reset.

use super::*;

/// A message of the worker: connection, number, bytes, mark.
fn got(mux: &mut Mux, worker: worker::Id) -> Vec<(psock::Id, String, u32)> {
    let mut batch = Vec::new();
    mux.poll_batches(worker, usize::MAX, at(0), &mut batch);
    let mut all = Vec::new();
    for mut batch in batch {
        while let Some(message) = batch.begin() {
            let text = String::from_utf8_lossy(message.payload()).into_owned();
            all.push((message.psock(), text, message.mark()));
        }
    }
    all
}

fn texts(mux: &mut Mux, worker: worker::Id) -> Vec<String> {
    got(mux, worker)
        .into_iter()
        .map(|(_, text, mark)| if mark > 0 { format!("{text}{mark}") } else { text })
        .collect()
}

fn ticket(psock: psock::Id, number: u64) -> Ticket {
    Ticket { psock, number }
}

fn sent(mux: &mut Mux, psock: psock::Id) -> String {
    let Some(mut transmit) = mux.transmit(psock) else { return String::new() };
    let bytes = transmit.slices(usize::MAX).collect::<Vec<_>>().concat();
    transmit.advance(bytes.len());
    mux.handle_transmitted(transmit, Outcome::Taken, at(0));
    String::from_utf8(bytes).unwrap()
}

fn with(order: Order) -> Mux {
    let mut mux = quick(Config::new(order));
    mux.report_opened(at(0));
    mux
}

/// Messages take a nanosecond: a worker gets many.
fn quick(config: Config) -> Mux {
    let mut mux = Mux::new(config);
    mux.service_time.ewma = 1;
    mux
}

fn check(mux: &Mux) {
    mux.check().expect("the counts fit");
}

#[test]
fn one_worker_gets_opened_before_the_messages() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky, Order::Key] {
        let mut mux = with(order);
        let worker = mux.clone_worker(8, at(0));
        let psock = attach(&mut mux);
        mux.handle_bytes(psock, b"one\ntwo\n", at(0));
        let rest: &[&str] = if order == Order::Serial { &[] } else { &["one", "two"] };
        assert_eq!(texts(&mut mux, worker), [&[""], rest].concat(), "{order:?}");
        check(&mux);
        mux.reply(worker, ticket(psock, 0), &b"220\n"[..], at(0)).expect("it has the event");
        mux.done(worker, ticket(psock, 0), at(0));
        assert_eq!(sent(&mut mux, psock), "220\n", "{order:?}: the server speaks first");
        let totals = mux.totals();
        assert_eq!((totals.received, totals.opened, totals.done), (2, 1, 1), "{order:?}");
        check(&mux);
    }
}

#[test]
fn open_connections_are_reported_to_the_first_worker_that_asks() {
    let mut mux = quick(Config::new(Order::None));
    let psock = attach(&mut mux);
    mux.handle_bytes(psock, b"one\n", at(0));
    let fresh = attach(&mut mux);
    mux.report_opened(at(0));
    mux.report_opened(at(0));
    let worker = mux.clone_worker(8, at(0));
    let mut all = got(&mut mux, worker);
    all.sort();
    let mut expected = vec![(psock, String::new(), 1), (psock, "one".into(), 0), (fresh, String::new(), 0)];
    expected.sort();
    assert_eq!(all, expected, "the first one has received something");
}

#[test]
fn another_worker_gets_opened_if_the_first_one_ends() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky] {
        // Before it was done, with and without a greeting; after it was done; by leaving.
        for (step, mark) in [("dies", ""), ("greets", "1"), ("done", ""), ("leaves", "")] {
            let mut mux = with(order);
            let [first, second] = [8, 8].map(|credit| mux.clone_worker(credit, at(0)));
            let psock = attach(&mut mux);
            assert_eq!(texts(&mut mux, first), [""]);
            match step {
                "greets" => mux.forward(psock, &b"220\n"[..], at(0)).expect("open"),
                "done" | "leaves" => assert!(mux.done(first, ticket(psock, 0), at(0))),
                _ => {}
            }
            match step {
                "leaves" => mux.leave(first, None, at(0)),
                _ => mux.handle_worker_died(first, at(0)),
            }
            check(&mux);
            mux.handle_bytes(psock, b"one\n", at(0));
            let rest: &[&str] = if order == Order::Serial { &[] } else { &["one"] };
            assert_eq!(texts(&mut mux, second), [&[mark], rest].concat(), "{order:?} {step}");
            assert!(texts(&mut mux, second).is_empty(), "{order:?} {step}: once");
            check(&mux);
        }
    }
}

#[test]
fn sticky_messages_wait_behind_the_event_of_their_new_worker() {
    let mut mux = with(Order::Sticky);
    let first = mux.clone_worker(1, at(0));
    let psock = attach(&mut mux);
    assert_eq!(texts(&mut mux, first), [""]);
    mux.done(first, ticket(psock, 0), at(0));
    mux.handle_bytes(psock, b"one\ntwo\nthree\n", at(0));
    assert_eq!(texts(&mut mux, first), ["one"]);
    let second = mux.clone_worker(8, at(0));
    mux.handle_worker_died(first, at(0));
    check(&mux);
    assert_eq!(texts(&mut mux, second), ["1", "one", "two", "three"], "mark 1: it was served before");
}

#[test]
fn an_opened_event_that_kills_workers_is_given_up() {
    let mut mux = with(Order::None);
    let psock = attach(&mut mux);
    for death in 0..3 {
        let worker = mux.clone_worker(1, at(0));
        assert_eq!(texts(&mut mux, worker), [""], "{death}");
        mux.handle_worker_died(worker, at(0));
    }
    let worker = mux.clone_worker(1, at(0));
    assert!(texts(&mut mux, worker).is_empty());
    let undone = std::iter::from_fn(|| mux.poll_event()).filter(|event| matches!(event, Event::Undone(_)));
    assert_eq!(undone.count(), 1);
    assert_eq!(mux.status(psock).map(|status| status.reserved), Some(0));
    check(&mux);
}

#[test]
fn no_worker_gets_the_event_of_a_connection_that_was_reset() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky, Order::Key] {
        // The event waits without any worker, waits with a worker that has not taken it, and is handed back by a worker.
        for held in [None, Some(false), Some(true)] {
            let mut mux = with(order);
            let early = held.map(|_| mux.clone_worker(8, at(0)));
            let psock = attach(&mut mux);
            mux.handle_bytes(psock, b"one\n", at(0));
            let held = held == Some(true);
            if let Some(worker) = early.filter(|_| held) {
                let mut one = Vec::new();
                mux.poll_at_most(worker, 1, at(0), &mut one);
                assert!(one[0].is_opened(), "{order:?}");
            }
            mux.handle_error(psock, 104, at(0));
            check(&mux);
            if let Some(worker) = early.filter(|_| held) {
                assert!(mux.status(psock).is_some());
                mux.handle_hand_back(worker, &[ticket(psock, 0)], at(0));
            }
            assert!(mux.status(psock).is_none(), "{order:?}: it has gone");
            let removed = std::iter::from_fn(|| mux.poll_event());
            assert_eq!(removed.filter(|event| matches!(event, Event::Removed(_))).count(), 1, "{order:?}");
            let worker = early.unwrap_or_else(|| mux.clone_worker(8, at(0)));
            assert!(texts(&mut mux, worker).is_empty(), "{order:?}");
            let totals = mux.totals();
            assert_eq!((totals.discarded_opened, totals.discarded_reset), (1, 1), "{order:?}");
            assert_eq!((totals.messages_done(), totals.handed_back), (0, 0), "{order:?}");
            check(&mux);
        }
    }
}

#[test]
fn the_event_of_a_new_worker_is_the_first_that_waits() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky] {
        let mut mux = with(order);
        let first = mux.clone_worker(1, at(0));
        let psock = attach(&mut mux);
        assert_eq!(texts(&mut mux, first), [""]);
        mux.done(first, ticket(psock, 0), at(0));
        // Serial: `one` is ready before.
        mux.handle_bytes(psock, b"one\ntwo\n", at(0));
        mux.handle_worker_died(first, at(0));
        check(&mux);
        let second = mux.clone_worker(1, at(0));
        let mut all = Vec::new();
        loop {
            let mut one = Vec::new();
            mux.poll_at_most(second, 1, at(0), &mut one);
            let Some(message) = one.pop() else { break };
            all.push(String::from_utf8_lossy(message.payload()).into_owned());
            mux.done(second, message.ticket(), at(0));
        }
        let expected = if order == Order::Serial { ["one", "", "two"] } else { ["", "one", "two"] };
        assert_eq!(all, expected, "{order:?}");
        check(&mux);
    }
}

#[test]
fn the_event_takes_a_turn_and_a_share() {
    for order in [Order::None, Order::Sticky] {
        let mut mux = quick(Config { in_flight: Some(1), ..Config::new(order) });
        mux.report_opened(at(0));
        let worker = mux.clone_worker(8, at(0));
        let (psock, other) = (attach(&mut mux), attach(&mut mux));
        mux.handle_bytes(psock, b"one\n", at(0));
        assert_eq!(
            got(&mut mux, worker),
            [(psock, String::new(), 0), (other, String::new(), 0)],
            "{order:?}: one of each connection"
        );
        assert!(texts(&mut mux, worker).is_empty(), "{order:?}");
        check(&mux);
        mux.done(worker, ticket(psock, 0), at(0));
        assert_eq!(texts(&mut mux, worker), ["one"], "{order:?}");
        check(&mux);
    }
}

#[test]
fn a_sticky_connection_that_moves_is_opened_by_its_new_worker() {
    let mut mux = quick(Config { rebalance: Some(1), ..Config::new(Order::Sticky) });
    mux.report_opened(at(0));
    let first = mux.clone_worker(8, at(0));
    let psocks = [0; 3].map(|_| attach(&mut mux));
    assert_eq!(texts(&mut mux, first).len(), 3);
    psocks.iter().for_each(|&psock| assert!(mux.done(first, ticket(psock, 0), at(0))));
    let second = mux.clone_worker(8, at(0));
    mux.handle_bytes(psocks[0], b"one\n", at(0));
    assert!(texts(&mut mux, first).is_empty());
    assert_eq!(texts(&mut mux, second), ["1", "one"]);
    check(&mux);
}

#[test]
fn messages_of_a_connection_that_a_worker_closed_are_given_to_workers() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky] {
        let mut mux = Mux::new(Config::new(order));
        let psock = attach(&mut mux);
        let worker = mux.clone_worker(1, at(0));
        mux.handle_bytes(psock, b"quit\nmore\n", at(0));
        assert_eq!(texts(&mut mux, worker), ["quit"]);
        mux.close_after(psock, Some(0), at(0));
        mux.done(worker, ticket(psock, 0), at(0));
        assert_eq!(end(&mut mux).map(|end| end.cause), Some(Cause::Closed), "{order:?}");
        assert_eq!(texts(&mut mux, worker), ["more"], "{order:?}");
        mux.done(worker, ticket(psock, 1), at(0));
        assert!(mux.status(psock).is_none());
        assert_eq!((mux.totals().done, mux.totals().discarded()), (2, 0));
        check(&mux);
    }
}

#[test]
fn removed_follows_the_last_message() {
    let mut mux = with(Order::None);
    let worker = mux.clone_worker(8, at(0));
    let psock = attach(&mut mux);
    mux.handle_bytes(psock, b"one\n", at(0));
    assert_eq!(texts(&mut mux, worker), ["", "one"]);
    mux.handle_error(psock, 104, at(0));
    let events = |mux: &mut Mux| {
        let events = std::iter::from_fn(|| mux.poll_event());
        events.filter(|event| matches!(event, Event::Ended(_) | Event::Removed(_))).collect::<Vec<_>>()
    };
    assert!(matches!(events(&mut mux)[..], [Event::Ended(_)]));
    mux.done(worker, ticket(psock, 0), at(0));
    assert!(events(&mut mux).is_empty(), "a message is with a worker");
    mux.done(worker, ticket(psock, 1), at(0));
    assert!(matches!(events(&mut mux)[..], [Event::Removed(id)] if id == psock));
}

#[test]
fn a_closed_connection_sends_what_was_queued() {
    for order in [Order::None, Order::Serial, Order::Sticky] {
        let mut mux = quick(Config::new(order));
        let psock = attach(&mut mux);
        let worker = mux.clone_worker(8, at(0));
        mux.handle_bytes(psock, b"quit\nmore\n", at(0));
        texts(&mut mux, worker);
        mux.reply(worker, ticket(psock, 0), &b"bye\n"[..], at(0)).expect("open");
        mux.close_after(psock, Some(0), at(0));
        assert!(mux.forward(psock, &b"late\n"[..], at(0)).is_err());
        assert!(mux.reply(worker, ticket(psock, 1), &b"late\n"[..], at(0)).is_err());
        assert!(end(&mut mux).is_none(), "{order:?}: the answer was not sent");
        assert_eq!(sent(&mut mux, psock), "bye\n", "{order:?}");
        let end = end(&mut mux).expect("an end");
        assert_eq!((end.cause, end.unsent), (Cause::Closed, 0), "{order:?}");
        mux.handle_worker_died(worker, at(0));
        check(&mux);
        assert_eq!(mux.totals().closed, 1);
    }
}

#[test]
fn a_close_waits_for_earlier_replies() {
    // Rows: number of the message whose reply is the last; what is sent.
    for (after, expected) in [(Some(1), "0\n1\n"), (Some(0), "0\n"), (None, "0\n1\n2\n")] {
        let mut mux = quick(Config::new(Order::Replies));
        let psock = attach(&mut mux);
        let worker = mux.clone_worker(8, at(0));
        mux.handle_bytes(psock, b"a\nb\nc\n", at(0));
        texts(&mut mux, worker);
        for number in [2, 1] {
            let _ = mux.reply(worker, ticket(psock, number), format!("{number}\n"), at(0));
            mux.done(worker, ticket(psock, number), at(0));
        }
        mux.close_after(psock, after, at(0));
        assert_eq!(sent(&mut mux, psock), "", "{after:?}: the first one is missing");
        check(&mux);
        mux.reply(worker, ticket(psock, 0), &b"0\n"[..], at(0)).expect("open");
        mux.done(worker, ticket(psock, 0), at(0));
        check(&mux);
        assert_eq!(sent(&mut mux, psock), expected, "{after:?}");
        assert_eq!(end(&mut mux).map(|end| end.cause), Some(Cause::Closed), "{after:?}");
        check(&mux);
        assert_eq!(mux.bytes(), 0);
    }
}

#[test]
fn a_reset_ends_at_once() {
    let (mut mux, psock) = lines(Config::new(Order::None));
    let worker = mux.clone_worker(8, at(0));
    mux.handle_bytes(psock, b"a\n", at(0));
    texts(&mut mux, worker);
    mux.reply(worker, ticket(psock, 0), &b"never\n"[..], at(0)).expect("open");
    mux.reset(psock, at(0));
    let end = end(&mut mux).expect("an end");
    assert_eq!((end.cause, end.unsent), (Cause::ResetByWorker, 1));
    assert_eq!(mux.totals().worker_resets, 1);
    mux.done(worker, ticket(psock, 0), at(0));
    check(&mux);
    assert!(mux.status(psock).is_none());
}

#[test]
fn connections_of_a_worker_that_ends_may_close_with_a_goodbye() {
    for leaves in [false, true] {
        let on_worker_end = OnWorkerEnd::Close { goodbye: b"bye\n" };
        let mut mux = quick(Config { on_worker_end, ..Config::new(Order::Sticky) });
        let (psock, first) = (attach(&mut mux), mux.clone_worker(1, at(0)));
        mux.handle_bytes(psock, b"one\ntwo\n", at(0));
        assert_eq!(texts(&mut mux, first), ["one"]);
        let (other, second) = (attach(&mut mux), mux.clone_worker(8, at(0)));
        mux.handle_bytes(other, b"else\n", at(0));
        assert_eq!(texts(&mut mux, second), ["else"]);
        match leaves {
            true => mux.leave(first, None, at(0)),
            false => mux.handle_worker_died(first, at(0)),
        }
        check(&mux);
        assert_eq!(sent(&mut mux, psock), "bye\n");
        assert_eq!(end(&mut mux).map(|end| (end.psock, end.cause)), Some((psock, Cause::WorkerEnded)));
        assert!(texts(&mut mux, second).is_empty(), "its messages are given up");
        let totals = mux.totals();
        assert_eq!((totals.undone, totals.worker_ended), (if leaves { 1 } else { 2 }, 1), "{leaves}");
        assert!(mux.interest(other).read, "the connection of another worker stays");
    }
}

#[test]
fn a_retired_worker_keeps_its_connections() {
    let mut mux = with(Order::Sticky);
    let first = mux.clone_worker(8, at(0));
    let psock = attach(&mut mux);
    assert_eq!(texts(&mut mux, first), [""]);
    let second = mux.clone_worker(8, at(0));
    mux.done(first, ticket(psock, 0), at(0));
    mux.retire(first, at(0));
    assert!(mux.is_bound(first) && !mux.is_bound(second));
    let others = [attach(&mut mux), attach(&mut mux)];
    mux.handle_bytes(psock, b"stays\n", at(0));
    assert_eq!(texts(&mut mux, first), ["stays"]);
    assert_eq!(got(&mut mux, second).len(), others.len(), "new connections");
    mux.done(first, ticket(psock, 1), at(0));
    mux.handle_eof(psock, at(0));
    assert!(!mux.is_bound(first));
    check(&mux);
}

/// Any operations: the counts fit, a connection has one event at a time, which a sticky worker gets before the messages.
#[test]
fn any_operations_keep_the_counts() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let ops = prop::collection::vec(any::<[u8; 2]>(), 0..200);
    let orders =
        prop::sample::select(vec![Order::None, Order::Replies, Order::Serial, Order::Sticky, Order::Key]);
    let shares = prop::sample::select(vec![None, Some(2), Some(1)]);
    let limits = prop::sample::select(vec![None, Some(1)]);
    let run = |((order, in_flight, rebalance), close, ops): (_, bool, Vec<[u8; 2]>)| {
        let on_worker_end = if close { OnWorkerEnd::Close { goodbye: b"bye\n" } } else { OnWorkerEnd::Move };
        let mut mux = quick(Config { in_flight, rebalance, on_worker_end, ..Config::new(order) });
        mux.report_opened(at(0));
        let (mut psocks, mut workers) = (Vec::new(), Vec::<(worker::Id, Vec<(Ticket, bool)>)>::new());
        let mut known = std::collections::BTreeMap::<psock::Id, worker::Id>::new();
        // Connections whose event was given up: workers died with it too often.
        let mut unknown = std::collections::BTreeSet::<psock::Id>::new();
        for [op, which] in ops {
            let which = usize::from(which);
            let psock: Option<psock::Id> = psocks.get(which % psocks.len().max(1)).copied();
            let place = which % workers.len().max(1);
            match (op % 13, psock, workers.get_mut(place)) {
                (0, ..) => psocks.push(attach(&mut mux)),
                (1, ..) => workers.push((mux.clone_worker(1 + which % 5, at(0)), Vec::new())),
                (2 | 3, Some(psock), _) => drop(mux.handle_bytes(psock, b"a\nb\nc\n", at(0))),
                (4, Some(psock), _) => drop(sent(&mut mux, psock)),
                (5, Some(psock), _) => mux.close_after(psock, None, at(0)),
                (6, Some(psock), _) => mux.reset(psock, at(0)),
                (7, Some(psock), _) => mux.handle_eof(psock, at(0)),
                (8, _, Some(_)) if which % 3 == 0 => {
                    mux.handle_worker_died(workers.swap_remove(place).0, at(0))
                }
                (9, _, Some(_)) if which % 3 == 0 => {
                    let (id, held) = workers.swap_remove(place);
                    mux.leave(id, None, at(0));
                    for (ticket, _) in held {
                        mux.done(id, ticket, at(0));
                    }
                }
                (10, _, Some((id, held))) => {
                    if let Some((ticket, opened)) = held.pop() {
                        let _ = mux.reply(*id, ticket, &b"re\n"[..], at(0));
                        assert!(mux.done(*id, ticket, at(0)), "{opened}");
                    }
                }
                (_, _, Some((id, held))) => {
                    let mut batch = Vec::new();
                    mux.poll_messages(*id, at(0), &mut batch);
                    for message in batch {
                        let (ticket, opened) = (message.ticket(), message.is_opened());
                        if opened {
                            known.insert(ticket.psock, *id);
                        }
                        let first = order != Order::Sticky
                            || known.get(&ticket.psock) == Some(id)
                            || unknown.contains(&ticket.psock);
                        assert!(first, "a message of {:?} before its event", ticket.psock);
                        held.insert(0, (ticket, opened));
                    }
                }
                _ => {}
            }
            let events: Vec<_> = std::iter::from_fn(|| mux.poll_event()).collect();
            for event in &events {
                match event {
                    Event::Removed(id) => {
                        known.remove(id);
                        assert!(mux.status(*id).is_none());
                    }
                    Event::Undone(message) if message.is_opened() => {
                        unknown.insert(message.ticket().psock);
                    }
                    _ => {}
                }
            }
            check(&mux);
            let opened = workers.iter().flat_map(|(_, held)| held.iter().filter(|(_, opened)| *opened));
            let mut opened: Vec<_> = opened.map(|(ticket, _)| ticket.psock).collect();
            let all = opened.len();
            opened.sort();
            opened.dedup();
            assert_eq!(opened.len(), all, "one event of a connection at a time");
        }
        Ok(())
    };
    runner.run(&((orders, shares, limits), any::<bool>(), ops), run).unwrap();
}
