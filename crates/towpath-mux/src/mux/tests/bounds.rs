//! Effects of each bound, when it is reached and when there is room again.

use bytes::Bytes;

use super::*;

#[test]
fn a_full_connection_is_not_read_until_half_is_done() {
    let charge = 2 + size_of::<Message>();
    let bound = Bound { high: 4 * charge, low: 2 * charge };
    let (mut mux, psock) = lines(Config { psock_bytes: bound, ..Config::new(Order::None) });
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
fn a_peer_that_accepts_nothing_affects_only_its_connection() {
    let config = Config { send_bytes: Bound::of(8), send_most: 64, ..Config::new(Order::None) };
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
    assert!(!mux.interest(psock).read, "a full connection is not read");
    let mut transmit = mux.transmit(psock).expect("an answer");
    transmit.advance(3);
    mux.handle_transmitted(transmit, Outcome::Blocked, at(0));
    assert!(mux.interest(psock).write);
    assert!(mux.transmit(psock).is_none(), "the socket takes no more");
    answer(&mut mux, 10, at(1)).expect("it may wait");

    // The peer accepts nothing for a minute.
    assert_eq!(mux.poll_timeout(), Some(at(60_000)));
    mux.handle_timeout(at(60_000));
    let ended = end(&mut mux).expect("an end");
    assert_eq!((ended.cause, ended.unsent, ended.outstanding), (Cause::SendTimeout, 2, 0));
    assert_eq!(mux.totals().discarded_ended, 1, "no worker begins the third message");
    assert_eq!(mux.totals().unsent, 2);

    // More than the limit; a single reply may exceed it.
    mux.handle_bytes(other, b"a\nb\n", at(60_000));
    answer(&mut mux, 65, at(60_000)).expect("it is there");
    assert!(end(&mut mux).is_none());
    answer(&mut mux, 1, at(60_000)).expect("it is there when it is answered");
    assert_eq!(end(&mut mux).expect("an end").cause, Cause::SendFull);
    assert_eq!((mux.totals().send_timeouts, mux.totals().send_full), (1, 1));
    assert_eq!(mux.bytes(), 0);
}

/// A block shared by several copied replies, and a weak reference to it.
fn share(bytes: &'static [u8]) -> (bytes::Bytes, std::sync::Weak<[u8]>) {
    let block: std::sync::Arc<[u8]> = [bytes, &[0; 60_000]].concat().into();
    let there = std::sync::Arc::downgrade(&block);
    (bytes::Bytes::from_owner(block).slice(..bytes.len()), there)
}

#[test]
fn waiting_replies_do_not_pin_shared_memory() {
    let (mut mux, psock) = lines(Config::new(Order::None));
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
    // Replies made while a writer is active and while the socket is blocked.
    let second = answer(&mut mux, b"two");
    transmit.advance(2);
    assert!(first.upgrade().is_some() && second.upgrade().is_some(), "nothing is copied early");
    mux.handle_transmitted(transmit, Outcome::Blocked, at(0));
    let third = answer(&mut mux, b"three");
    for there in [first, second, third] {
        assert!(there.upgrade().is_none());
    }
    mux.handle_writable(psock, at(1));
    let mut transmit = mux.transmit(psock).expect("the rest");
    assert_eq!(transmit.slices(usize::MAX).collect::<Vec<_>>().concat(), b"etwothree");

    let (mut mux, psock) = lines(Config::new(Order::Replies));
    let workers = [mux.clone_worker(1, at(0)), mux.clone_worker(1, at(0))];
    mux.handle_bytes(psock, b"a\nb\n", at(0));
    let [slow, fast] = workers.map(|worker| tickets(&mut mux, worker, at(0))[0]);
    let (shared, there) = share(b"two");
    mux.reply(workers[1], fast, shared, at(0)).expect("it is there");
    assert!(there.upgrade().is_none(), "a reply that waits for an earlier one is copied");
    mux.reply(workers[0], slow, &b"one"[..], at(0)).expect("it is there");
    mux.done(workers[0], slow, at(0));
    mux.done(workers[1], fast, at(0));
    let mut transmit = mux.transmit(psock).expect("both");
    assert_eq!(transmit.slices(usize::MAX).collect::<Vec<_>>().concat(), b"onetwo");
}

/// A worker that answers byte by byte does not multiply the memory and the time of replies that wait.
#[test]
fn short_replies_that_wait_are_joined() {
    const BYTES: usize = 1 << 18;
    let (mut mux, psock) = lines(Config::new(Order::Replies));
    let workers = [mux.clone_worker(1, at(0)), mux.clone_worker(1, at(0))];
    mux.handle_bytes(psock, b"a\nb\n", at(0));
    let [first, second] = workers.map(|worker| tickets(&mut mux, worker, at(0))[0]);
    for byte in (0..BYTES).map(|at| [at as u8]) {
        mux.reply(workers[0], first, Bytes::copy_from_slice(&byte), at(0)).expect("it is there");
        // Waits for the first reply.
        mux.reply(workers[1], second, Bytes::copy_from_slice(&byte), at(0)).expect("it is there");
        mux.reply(workers[1], second, Bytes::new(), at(0)).expect("it is there");
    }
    mux.done(workers[0], first, at(0));
    mux.done(workers[1], second, at(0));
    let mut transmit = mux.transmit(psock).expect("both");
    let pieces = transmit.pieces().count();
    assert!(pieces < 600, "{pieces} pieces of {} bytes", 2 * BYTES);
    let sent = transmit.slices(usize::MAX).flatten().copied();
    assert!(sent.eq((0..2 * BYTES).map(|at| at as u8)));
}

#[test]
fn a_full_mux_reads_nothing_and_ends_the_largest_connection() {
    let (mut mux, small) = lines(Config { mux_bytes: Bound::of(150_000), ..Config::new(Order::None) });
    let big = attach(&mut mux);
    mux.handle_bytes(small, &[b'x'; 20_000], at(0));
    mux.handle_bytes(big, &[b'x'; 30_000], at(0));
    assert!(end(&mut mux).is_none(), "one read buffer each is allowed");
    let third = attach(&mut mux);
    assert_eq!(mux.handle_bytes(big, &[b'x'; 5000], at(0)), 5000);
    assert_eq!(end(&mut mux).map(|end| (end.psock, end.cause)), Some((big, Cause::Memory)));
    assert!(mux.interest(small).read && mux.interest(third).read);
}

/// Incomplete messages fill the mux while a worker holds a message, possibly forever. The mux does not wait
/// for it.
#[test]
fn a_mux_full_of_partial_messages_does_not_wait_for_workers() {
    let (mut mux, small) = lines(Config { mux_bytes: Bound::of(100_000), ..Config::new(Order::None) });
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

/// Whole messages fill the mux: it waits for workers, which free memory.
#[test]
fn a_mux_full_of_messages_waits_for_workers() {
    let config =
        Config { mux_bytes: Bound::of(100_000), psock_bytes: Bound::of(90_000), ..Config::new(Order::None) };
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

/// The send timer starts when the peer can accept something.
#[test]
fn replies_behind_an_earlier_one_do_not_start_the_send_timer() {
    let (mut mux, psock) = lines(Config::new(Order::Replies));
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
    assert!(end(&mut mux).is_none(), "the first reply was made just now");
    let mut transmit = mux.transmit(psock).expect("the first answer");
    transmit.advance(3);
    mux.handle_transmitted(transmit, Outcome::Taken, at(late));
    mux.done(workers[0], slow, at(2 * late));
    mux.handle_timeout(at(2 * late));
    assert!(end(&mut mux).is_none(), "the others could not be sent before");
    mux.handle_timeout(at(2 * late + 60_000));
    assert_eq!(end(&mut mux).map(|end| end.cause), Some(Cause::SendTimeout), "nothing was accepted");
}

#[test]
fn a_connection_attached_while_full_is_read_later() {
    let (mut mux, psock) = lines(Config { mux_bytes: Bound::of(4000), ..Config::new(Order::None) });
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
    let events = std::iter::from_fn(|| mux.poll_event());
    assert!(events.into_iter().any(|event| matches!(event, Event::Interest(id) if id == late)));
    assert!(mux.interest(late).read);
}
