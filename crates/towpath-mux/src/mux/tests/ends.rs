//! Ends of connections and their counters.

use super::*;

#[test]
fn ends_and_their_causes() {
    let row = |mux: &mut Mux, cause: &str, errno: i32| {
        let end = end(mux).unwrap_or_else(|| panic!("no end; expected {cause}"));
        assert_eq!(end.cause.to_string(), cause);
        assert_eq!(end.cause.errno(), errno);
        mux.check().expect("the counts fit");
        end
    };
    let (mut mux, psock) = lines(Config::new(Order::None));
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
    assert_eq!(mux.show().psock_totals.rx_msg_timeouts, 1);

    let psock = attach(&mut mux);
    mux.handle_bytes(psock, &[b'x'; 1 << 17], at(200));
    row(
        &mut mux,
        &format!("at byte 0: EMSGSIZE: no end of the message within 65536 bytes ({}78)", "78 ".repeat(31)),
        90,
    );
    assert_eq!(mux.show().psock_totals.rx_msg_too_big, 1);

    let psock = attach(&mut mux);
    mux.handle_error(psock, 104, at(200));
    row(&mut mux, "Connection reset by peer (os error 104)", 104);

    // Messages received before the end are answered before it.
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
fn ends_are_counted_by_their_cause() {
    let mut mux = Mux::new(Config::new(Order::None));
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
    assert_eq!(mux.show().psock_totals.rx_msg_too_big, 1, "KCM has a counter for it");
    let clean = attach(&mut mux, "line");
    mux.handle_eof(clean, at(0));
    assert_eq!(counted(&mux), [1, 1, 1]);
}

#[test]
fn a_given_back_connection_has_its_unread_bytes() {
    let mut mux = Mux::new(Config::new(Order::None));
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
    let (mut mux, psock) = lines(Config::new(Order::None));
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
fn stale_timers_are_dropped() {
    let (mut mux, psock) =
        lines(Config { idle: Some(Duration::from_secs(86_400)), ..Config::new(Order::None) });
    for _ in 0..5000 {
        let psock = attach(&mut mux);
        mux.handle_eof(psock, at(0));
    }
    assert_eq!(mux.totals().unattach, 5000);
    assert!(mux.timers.len() <= 1100, "{}", mux.timers.len());
    assert_eq!(mux.poll_timeout(), Some(at(86_400_000)), "the timer of the open connection is kept");
    assert!(events(&mut mux).iter().all(|event| matches!(event, Event::Ended(end) if end.psock != psock)));
    mux.handle_timeout(at(86_400_000));
    assert_eq!(end(&mut mux).map(|end| (end.psock, end.cause)), Some((psock, Cause::Idle)));
    assert_eq!(mux.totals().idle, 1);
}
