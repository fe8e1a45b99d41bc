//! A worker and an engine in the same process: single and combined replies, and the report of the current message.

use crate::lane::batch::Part;
use crate::{Channel, Config, Endpoint, Position, Verdict};

use super::turn::SMALL;
use super::*;

fn front() -> (tempfile::TempDir, Endpoint) {
    let directory = tempfile::tempdir().unwrap();
    let config = Config { messages: true, bursts: true, ..Config::default() };
    let endpoint = Endpoint::bind(directory.path().join("ring"), config).unwrap();
    (directory, endpoint)
}

fn accept(endpoint: &mut Endpoint) -> Channel {
    loop {
        match endpoint.accept().unwrap() {
            Some(channel) => return channel,
            None => endpoint.wait(None).unwrap(),
        }
    }
}

fn parts<'a>(messages: &'a [&'a str]) -> impl Iterator<Item = Part<'a>> + Clone {
    messages.iter().map(|text| Part { bytes: text.as_bytes(), skip: 1, trim: 0, mark: 5, hash: 6 })
}

/// Replies (number answered, messages done, replies, text) until `frames` were released, or the worker has ended.
fn until(channel: &mut Channel, frames: usize) -> Vec<(u32, u32, u32, String)> {
    let (mut replies, mut back) = (Vec::new(), 0);
    loop {
        let there = channel.check_peer();
        back += channel.poll_verdicts(0, |_, decision| assert_eq!(decision.verdict, Verdict::Pass));
        channel.poll_messages(|header, bytes| {
            assert_eq!(header.kind, Kind::REPLY);
            let text = String::from_utf8(bytes.to_vec()).unwrap();
            replies.push((header.port, header.group, header.mark, text));
        });
        if back >= frames || !there {
            return replies;
        }
        channel.wait(None).unwrap();
    }
}

#[test]
fn several_messages_of_a_frame_are_answered_together() {
    let (directory, mut endpoint) = front();
    let path = directory.path().join("ring");
    let worker = std::thread::spawn(move || {
        let mut worker = Worker::attach(path, &Options::default()).unwrap().taking(16);
        worker.serve(|message, reply| {
            assert_eq!(message.connection(), Connection { index: 3, generation: 4 });
            match message.payload() {
                b"silent" => {}
                b"long" => reply.extend(std::iter::repeat_n(b'l', SMALL)),
                text => reply.extend_from_slice(text),
            }
        })
    });
    let mut channel = accept(&mut endpoint);
    while channel.batch_max() != 16 {
        std::thread::yield_now();
    }
    let meta = Meta {
        kind: Kind::MESSAGE,
        port: 3,
        group: 4,
        layers: crate::Layers { network: 1, ..Default::default() },
        ..Meta::default()
    };
    let one = channel.send(b"xone", &meta).unwrap().0;
    let three = channel.send_batch(parts(&["xa", "xsilent", "xc"]), &meta).unwrap().0;
    let long = channel.send_batch(parts(&["xlong", "xd", "xsilent"]), &meta).unwrap().0;
    let none = channel.send_batch(parts(&["xsilent", "xsilent"]), &meta).unwrap();
    let replies = until(&mut channel, 4);
    let expected = [
        (one, 1, 1, "one".to_owned()),
        (three, 3, 2, "ac".to_owned()),
        (long, 1, 1, "l".repeat(SMALL)),
        (long, 3, 1, "d".to_owned()),
    ];
    assert_eq!(replies, expected);
    assert_eq!(channel.position(), Some(Position::At(none, 1)));
    drop(channel);
    worker.join().unwrap().unwrap();
}

#[test]
fn a_message_whose_answer_is_too_large_is_done_and_the_others_are_answered() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ring");
    let config = Config { messages: true, bursts: true, oneshot_max: 0, ..Config::default() };
    let mut endpoint = Endpoint::bind(&path, config).unwrap();
    let worker = std::thread::spawn(move || {
        let mut worker = Worker::attach(path, &Options::default()).unwrap().taking(8);
        let (mut seen, mut refused) = (String::new(), Vec::new());
        loop {
            let served = worker.serve(|message, reply| {
                seen += std::str::from_utf8(message.bytes()).unwrap();
                let long = matches!(message.bytes(), b"b" | b"d");
                reply.extend(std::iter::repeat_n(b'r', if long { 4 << 20 } else { 1 }));
            });
            match served {
                Err(ServeError::Reply { why: ReserveError::TooLarge, .. }) => refused.push(seen.len()),
                ended => return (seen, refused, ended),
            }
        }
    });
    let mut channel = accept(&mut endpoint);
    let batch = channel.send_batch(parts(&["a", "b", "c"]), &Meta::default()).unwrap().0;
    channel.send(b"d", &Meta { kind: Kind::MESSAGE, ..Meta::default() }).unwrap();
    let last = channel.send_batch(parts(&["a", "e", "b"]), &Meta::default()).unwrap().0;
    let r = || "r".to_owned();
    let expected = [(batch, 1, 1, r()), (batch, 3, 1, r()), (last, 2, 2, "rr".to_owned())];
    assert_eq!(until(&mut channel, 3), expected);
    drop(channel);
    let (seen, refused, ended) = worker.join().unwrap();
    ended.unwrap();
    assert_eq!((seen.as_str(), refused), ("abcdaeb", vec![2, 4, 7]));
}

/// Short replies together can exceed a small ring.
#[test]
fn answers_that_are_too_long_together_go_in_parts() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ring");
    let tx = crate::Geometry::with(8 << 10, 64).unwrap();
    let config = Config { messages: true, bursts: true, oneshot_max: 0, tx, ..Config::default() };
    let mut endpoint = Endpoint::bind(&path, config).unwrap();
    let worker = std::thread::spawn(move || {
        let mut worker = Worker::attach(path, &Options::default()).unwrap().taking(8);
        worker.serve(|message, reply| reply.extend(std::iter::repeat_n(message.bytes()[0], 3000)))
    });
    let mut channel = accept(&mut endpoint);
    let batch = channel.send_batch(parts(&["a", "b", "c", "d"]), &Meta::default()).unwrap().0;
    let (mut text, mut replies) = (String::new(), 0);
    for (port, group, mark, bytes) in until(&mut channel, 1) {
        replies += mark;
        assert_eq!((port, group), (batch, replies));
        text += &bytes;
    }
    assert_eq!(replies, 4);
    assert!(text == ["a", "b", "c", "d"].map(|c| c.repeat(3000)).concat());
    drop(channel);
    worker.join().unwrap().unwrap();
}

#[test]
fn invalid_messages_are_an_error_and_serving_continues() {
    let (directory, mut endpoint) = front();
    let path = directory.path().join("ring");
    let worker = std::thread::spawn(move || {
        let mut worker = Worker::attach(path, &Options::default()).unwrap().taking(8);
        let error = worker.serve(|_, _| panic!("there is no message")).unwrap_err();
        assert!(matches!(error, ServeError::Recv(RecvError::Damaged(_))), "{error}");
        worker.serve(|message, reply| reply.extend_from_slice(message.bytes()))
    });
    let mut channel = accept(&mut endpoint);
    channel.send(b"nonsense", &Meta { kind: Kind::MESSAGES, mark: 5, ..Meta::default() }).unwrap();
    let good = channel.send(b"good", &Meta { kind: Kind::MESSAGE, ..Meta::default() }).unwrap().0;
    assert_eq!(until(&mut channel, 1), [(good, 1, 1, "good".to_owned())]);
    drop(channel);
    worker.join().unwrap().unwrap();
}

#[test]
fn an_answer_that_found_no_room_in_time_is_sent_by_the_next_call() {
    let (directory, mut endpoint) = front();
    let path = directory.path().join("ring");
    let worker = std::thread::spawn(move || Worker::attach(path, &Options::default()).unwrap().taking(8));
    let mut channel = accept(&mut endpoint);
    let mut worker = worker.join().unwrap();
    let meta = Meta { kind: Kind::REPLY, ..Meta::default() };
    let mut filled = 0;
    while worker.queue().try_send(b"x", &meta).is_ok() {
        filled += 1;
    }
    let batch = channel.send_batch(parts(&["a", "b"]), &Meta::default()).unwrap().0;
    worker.queue().set_send_timeout(Some(Duration::from_millis(1)));
    let error = worker.serve(|message, reply| reply.extend_from_slice(message.bytes())).unwrap_err();
    assert!(matches!(error, ServeError::Reply { len: 2, why: ReserveError::RingFull }), "{error}");
    while filled > 0 {
        filled -= channel.poll_messages(|_, bytes| assert_eq!(bytes, b"x"));
    }
    let worker = std::thread::spawn(move || worker.serve(|_, _| panic!("both are done")));
    assert_eq!(until(&mut channel, 1), [(batch, 2, 2, "ab".to_owned())]);
    drop(channel);
    worker.join().unwrap().unwrap();
}

#[test]
fn a_ticket_names_what_is_still_there_and_nothing_else() {
    let (directory, mut endpoint) = front();
    let path = directory.path().join("ring");
    let worker = std::thread::spawn(move || Worker::attach(path, &Options::default()).unwrap());
    let mut channel = accept(&mut endpoint);
    let mut worker = worker.join().unwrap();
    assert!(worker.try_recv().unwrap().is_none());
    assert!(worker.recv_timeout(Duration::ZERO).unwrap().is_none() && !worker.queue().is_ended());
    channel.send(b"hello", &Meta { kind: Kind::MESSAGE, ..Meta::default() }).unwrap();
    channel.kick();
    let ticket = worker.recv().unwrap().unwrap().into_ticket();
    for wrong in [
        Ticket { lane: 1, ..ticket },
        Ticket { seq: ticket.seq + 1, ..ticket },
        Ticket { at: u32::MAX, ..ticket },
    ] {
        assert!(worker.recall(wrong).is_none(), "{wrong:?}");
    }
    let message = worker.recall(ticket).unwrap();
    assert_eq!(worker.bytes(&message), b"hello");
    worker.done(message);
    assert!(worker.recall(ticket).is_none());
    drop(channel);
    assert!(worker.recv_timeout(Duration::from_secs(3600)).unwrap().is_none() && worker.queue().is_ended());
}

#[test]
fn messages_done_before_a_panic_are_answered() {
    let (directory, mut endpoint) = front();
    let path = directory.path().join("ring");
    let worker = std::thread::spawn(move || {
        let mut worker = Worker::attach(path, &Options::default()).unwrap().taking(8);
        worker.serve(|message, reply| {
            reply.extend_from_slice(message.bytes());
            assert_ne!(message.bytes(), b"bad", "it is bad");
        })
    });
    let mut channel = accept(&mut endpoint);
    let frame = channel.send_batch(parts(&["a", "b", "bad", "c"]), &Meta::default()).unwrap();
    assert_eq!(until(&mut channel, 1), [(frame.0, 2, 2, "ab".to_owned())]);
    assert_eq!(channel.position(), Some(Position::At(frame, 2)), "that one is to blame");
    assert_eq!(channel.held(), 1);
    assert!(worker.join().is_err());
}
