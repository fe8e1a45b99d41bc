//! Batches are equivalent to their single messages.

use super::*;

/// Final counters when a worker answers and completes four lines, as batches or one by one.
fn four_lines(order: Order, rows: bool) -> impl PartialEq + std::fmt::Debug {
    let (mut mux, psock) = lines(Config::new(order));
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
                mux.reply_batch(worker, (first, count), count, bytes, at(0)).expect("it holds them");
                assert_eq!(mux.done_batch(worker, (first, count), at(0)), count);
            });
            assert_eq!(mux.done_batch(worker, (first, count), at(0)), 0, "done once");
            assert!(mux.reply_batch(worker, (first, count), 1, bytes::Bytes::new(), at(0)).is_err());
        } else {
            for (ticket, bytes) in held.iter().zip(answers.by_ref()) {
                mux.reply(worker, *ticket, bytes, at(0)).expect("it holds it");
                assert!(mux.done(worker, *ticket, at(0)));
            }
        }
        if let Some(mut transmit) = mux.transmit(psock) {
            let before = written.len();
            written.extend(transmit.slices(usize::MAX).flatten().copied());
            transmit.advance(written.len() - before);
            mux.handle_transmitted(transmit, Outcome::Taken, at(0));
        }
    }
    mux.check().expect("it counted right");
    (written, format!("{:?}", mux.show()))
}

#[test]
fn batches_count_like_single_messages() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky, Order::Key] {
        assert_eq!(four_lines(order, true), four_lines(order, false), "{order:?}");
    }
}

#[test]
fn the_rest_of_a_batch_is_redelivered_when_its_worker_dies() {
    let (mut mux, psock) = lines(Config::new(Order::None));
    let worker = mux.clone_worker(64, at(0));
    // Two short messages, so that a turn has several.
    for _ in 0..2 {
        mux.handle_bytes(psock, b"short\n", at(0));
        let held = tickets(&mut mux, worker, at(0));
        assert_eq!(mux.done_batch(worker, (held[0], 1), at(0)), 1);
    }
    mux.handle_bytes(psock, b"1\n2\n3\n4\n", at(0));
    let held = tickets(&mut mux, worker, at(0));
    assert_eq!(held.len(), 4);
    mux.reply_batch(worker, (held[0], 2), 2, bytes::Bytes::from_static(b"12"), at(0)).expect("it holds them");
    mux.handle_worker_died(worker, at(0));
    assert_eq!((mux.totals().done, mux.totals().redelivered), (4, 2));
    let other = mux.clone_worker(64, at(0));
    assert_eq!(poll(&mut mux, other, at(0)), ["3", "4"]);
}

#[test]
fn one_reply_answers_single_messages_and_batches() {
    let (mut mux, psock) = lines(Config::new(Order::None));
    let worker = mux.clone_worker(64, at(0));
    // Short messages, so that a turn has several.
    (mux.service_time.ewma, mux.service_time.median) = (1, 1);
    let mut rows = Vec::new();
    for read in [&b"1\n"[..], b"2\n3\n", b"4\n", b"5\n6\n"] {
        mux.handle_bytes(psock, read, at(0));
        mux.poll_batches(worker, 64, at(0), &mut rows);
    }
    let first = rows[0].first().expect("a message");
    let all: usize = rows.iter().map(|run| run.views().count()).sum();
    assert_eq!((rows.len(), all), (4, 6));
    mux.reply_batch(worker, (first, 6), 1, bytes::Bytes::from_static(b"x"), at(0)).expect("it holds them");
    mux.handle_worker_died(worker, at(0));
    assert_eq!((mux.totals().done, mux.totals().redelivered), (6, 0));
    mux.check().expect("it counted right");
}

#[test]
fn a_batch_is_split_by_partial_completions() {
    // Steps (answered or done, first message, number), and the messages that are delivered again after the
    // worker dies.
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
        let (mut mux, psock) = lines(Config::new(Order::None));
        let worker = mux.clone_worker(64, at(0));
        (mux.service_time.ewma, mux.service_time.median) = (1, 1);
        mux.handle_bytes(psock, b"1\n2\n3\n4\n5\n6\n", at(0));
        let mut rows = Vec::new();
        assert_eq!(mux.poll_batches(worker, 2, at(0), &mut rows), 2, "up to the limit");
        assert_eq!(mux.poll_batches(worker, 64, at(0), &mut rows), 4, "the rest");
        assert_eq!(
            rows.iter().map(|row| row.bytes(9)).collect::<Vec<_>>(),
            [&b"1\n2\n"[..], b"3\n4\n5\n6\n"]
        );
        let held: Vec<Ticket> = rows.iter().flat_map(Batch::rest).collect();
        for (say, first, count) in said {
            let row = (held[*first], *count);
            match say {
                Answered => {
                    mux.reply_batch(worker, row, 1, bytes::Bytes::from_static(b"x"), at(0)).expect("there")
                }
                Done => assert!(mux.done_batch(worker, row, at(0)) > 0),
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
fn short_counts_from_the_first_message_not_begun() {
    let (mut mux, psock) = lines(Config::new(Order::None));
    let worker = mux.clone_worker(64, at(0));
    (mux.service_time.ewma, mux.service_time.median) = (1, 1);
    let mut rows = Vec::new();
    mux.handle_bytes(psock, b"begun\na\nbbbb\nc\ndd\n", at(0));
    mux.poll_batches(worker, 64, at(0), &mut rows);
    let run = &mut rows[0];
    run.skip(1);
    // Limits: number of messages, bytes of each, bytes together.
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
