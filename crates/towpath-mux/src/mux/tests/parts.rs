//! Messages in parts: cases that the model does not cover.

use super::*;
use crate::framing::Framing;

/// A mux with a connection of `http1 body=stream`, and parts of at least 100 bytes.
fn uploads(config: Config) -> (Mux, psock::Id) {
    let mut mux = Mux::new(config);
    let framing: Framing = "http1 body=stream".parse().expect("a framing");
    let time = Some(Duration::from_secs(1));
    let limits = Limits { part: 100, message: 1000, head_time: time, body_time: time, ..Limits::default() };
    let psock = mux.attach(framing, limits, at(0)).expect("it does not drain");
    (mux, psock)
}

const HEAD: &[u8] = b"POST / HTTP/1.1\r\nContent-Length: 50000\r\n\r\n";

/// Begins the message at the worker.
fn begin(mux: &mut Mux, psock: psock::Id, worker: worker::Id) -> Ticket {
    mux.handle_bytes(psock, HEAD, at(0));
    let mut messages = Vec::new();
    assert_eq!(mux.poll_messages(worker, at(0), &mut messages), 1);
    assert!(messages[0].more() && messages[0].bytes()[..] == *HEAD, "the head comes at once");
    let ticket = messages[0].ticket();
    assert!(mux.part_done(worker, ticket, at(0)));
    ticket
}

#[test]
fn a_connection_is_not_read_while_its_worker_lags() {
    let (mut mux, psock) = uploads(Config { stream_bytes: Bound::of(4000), ..Config::new(Order::Replies) });
    let worker = mux.clone_worker(9, at(0));
    let ticket = begin(&mut mux, psock, worker);
    let mut given = 0;
    while mux.handle_bytes(psock, &[b'x'; 500], at(0)) > 0 {
        given += 500;
    }
    assert!((3000..6000).contains(&given) && mux.bytes() < 8000, "{given} bytes, {} held", mux.bytes());
    let (mut parts, mut bytes) = (0, 0);
    while let Some(part) = mux.next_part(worker) {
        assert_eq!(part.kind, PartKind::More);
        (parts, bytes) = (parts + 1, bytes + part.view().bytes().len());
    }
    assert!(parts == 4 && bytes < given, "four parts at a time");
    assert!(!mux.interest(psock).read);
    while mux.part_done(worker, ticket, at(0)) {
        while let Some(part) = mux.next_part(worker) {
            bytes += part.view().bytes().len();
        }
    }
    assert!(bytes == given && mux.interest(psock).read);
    assert_eq!((mux.totals().in_hand, mux.totals().done), (1, 0), "one message");
    mux.check().expect("everything is counted");
}

#[test]
fn a_worker_gets_other_messages_between_two_parts() {
    let (mut mux, psock) = uploads(Config::new(Order::Replies));
    let other = mux.attach("line".parse().expect("a framing"), Limits::default(), at(0)).expect("open");
    let worker = mux.clone_worker(1, at(0));
    begin(&mut mux, psock, worker);
    mux.handle_bytes(other, b"a\n", at(0));
    let ticket = tickets(&mut mux, worker, at(0))[0];
    assert!(ticket.psock == other && mux.done(worker, ticket, at(0)));
}

#[test]
fn each_part_has_the_time_of_a_message() {
    let (mut mux, psock) = uploads(Config::new(Order::Replies));
    let worker = mux.clone_worker(9, at(0));
    let ticket = begin(&mut mux, psock, worker);
    for step in 1..5 {
        mux.handle_timeout(at(step * 900));
        assert!(mux.status(psock).is_some_and(|status| !status.rx_stop));
        mux.handle_bytes(psock, &[b'x'; 100], at(step * 900));
    }
    // Less than a part does not extend it.
    mux.handle_bytes(psock, &[b'x'; 99], at(4500));
    mux.handle_timeout(at(4600));
    assert_eq!(
        mux.next_part(worker).map(|part| part.kind),
        Some(PartKind::Cut),
        "no part of a message that is cut"
    );
    assert!(mux.next_part(worker).is_none() && mux.done(worker, ticket, at(4600)));
    let end = end(&mut mux).expect("an end");
    assert!(matches!(&end.cause, Cause::Framing(failure) if failure.offset == 0), "{}", end.cause);
    assert_eq!((mux.totals().streamed, mux.totals().streams_cut, mux.totals().done), (1, 1, 1));
    assert_eq!(mux.bytes(), 0);
}

#[test]
fn a_message_that_was_begun_is_never_given_again() {
    for begun in [false, true] {
        let (mut mux, psock) = uploads(Config { redeliver: 9, ..Config::new(Order::Replies) });
        let [first, second] = [mux.clone_worker(9, at(0)), mux.clone_worker(9, at(0))];
        if begun {
            begin(&mut mux, psock, first);
        } else {
            mux.handle_bytes(psock, HEAD, at(0));
            let ticket = tickets(&mut mux, first, at(0))[0];
            mux.handle_hand_back(first, &[ticket], at(0));
        }
        mux.handle_bytes(psock, &[b'x'; 500], at(0));
        mux.handle_worker_died(first, at(0));
        let given = tickets(&mut mux, second, at(0));
        assert_eq!(given.len(), usize::from(!begun));
        assert_eq!((mux.totals().undone, mux.totals().streams_undone), (u64::from(begun), u64::from(begun)));
        if begun {
            assert_eq!(end(&mut mux).expect("an end").cause, Cause::WorkerEnded);
            assert_eq!((mux.totals().worker_ended, mux.bytes()), (1, 0));
            continue;
        }
        assert!(mux.part_done(second, given[0], at(0)));
        assert_eq!(mux.next_part(second).expect("the part that came before").view().bytes().len(), 500);
    }
}
