//! Segmentation, limits, timers, ends.

use proptest::prelude::*;

use super::*;

fn assembler(text: &str, limits: Limits) -> Assembler {
    Assembler::new(text.parse().expect("a framing"), limits)
}

fn at(secs: u64) -> Time {
    Time::from_secs(secs)
}

/// Messages and the final event of a stream fed in `pieces`.
fn run<'a>(assembler: Assembler, pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Vec<u8>>, String) {
    run_by(assembler, pieces, false)
}

/// As [`run`]; uses the plain scanner if `scans`.
fn run_by<'a>(
    mut assembler: Assembler,
    pieces: impl IntoIterator<Item = &'a [u8]>,
    scans: bool,
) -> (Vec<Vec<u8>>, String) {
    let (mut places, mut all) = (Vec::new(), Vec::new());
    let mut last = String::new();
    let mut drain = |assembler: &mut Assembler| {
        loop {
            if scans {
                assembler.scan(|offset, message| places.push((offset, message.length)));
            }
            let Some(event) = assembler.poll(at(0)) else { break };
            match event {
                Event::Message(message) => places.push((message.offset, message.bytes.len())),
                Event::GiveBack { offset, .. } => last = format!("give back {offset}"),
                Event::Failed(failure) => last = format!("{} {}", failure.offset, failure.cause.name()),
                Event::End { offset, inside, .. } => last = format!("end {offset} {inside}"),
            }
        }
    };
    for piece in pieces {
        let mut rest = piece;
        while !rest.is_empty() {
            let took = assembler.handle_bytes(rest);
            drain(&mut assembler);
            if took == 0 {
                break;
            }
            all.extend_from_slice(&rest[..took]);
            rest = &rest[took..];
        }
    }
    assembler.handle_end();
    drain(&mut assembler);
    let message = |(offset, length)| all[offset as usize..offset as usize + length].to_vec();
    (places.into_iter().map(message).collect(), last)
}

#[test]
fn bounds_and_causes() {
    let limits = Limits { head: 8, message: 16, ..Limits::default() };
    // Framing, stream, number of messages, final event.
    let rows: &[(&str, &[u8], usize, &str)] = &[
        ("length=1", b"\x02a\x03bc", 2, "end 5 0"),
        ("length=1", b"\x02a\x03b", 1, "end 2 2"),
        ("length=1", b"\x10aaaaaaaaaaaaaaa", 1, "end 16 0"),
        ("length=1", b"\x01\x11", 1, "1 EMSGSIZE"),
        ("length=1", b"\x01\x00", 1, "1 EPROTO"),
        ("delimiter=\"\\n\"", b"a\nbbbbbbbbbbbbbbbbbbbbbbb\n", 1, "2 EMSGSIZE"),
        ("delimiter=\"\\n\" max=4", b"aaa\naaaa\n", 1, "4 EMSGSIZE"),
        ("when 01 (fixed=1) when 16 (giveback)", b"\x01\x01\x16\x03", 2, "give back 2"),
        ("when 01 (fixed=1) when 16 (giveback)", b"\x01\x02", 1, "1 EBADMSG"),
    ];
    for (text, stream, messages, end) in rows {
        for size in 1..=stream.len() {
            let (found, last) = run(assembler(text, limits), stream.chunks(size));
            assert_eq!((found.len(), last.as_str()), (*messages, *end), "{text} in pieces of {size}");
        }
    }
}

#[test]
fn a_function_that_never_decides_hits_the_head_limit() {
    let limits = Limits { head: 64, ..Limits::default() };
    for size in [1, 7, 64, 200] {
        let never = Framing::custom("never", |bytes: &[u8], _: &mut State| Step::Need(bytes.len() + 1));
        let (messages, last) = run(Assembler::new(never, limits), [0; 200].chunks(size));
        assert_eq!((messages.len(), last.as_str()), (0, "0 EMSGSIZE"), "pieces of {size}");
    }
}

#[test]
fn a_function_that_contradicts_itself_is_an_error() {
    let wavers = Framing::custom("wavers", |bytes: &[u8], _: &mut State| match bytes.len() {
        asked @ 0..4 => Step::Need(asked + 1),
        _ => Step::from(2),
    });
    let (messages, last) = run(Assembler::new(wavers, Limits::default()), b"aaaa".chunks(1));
    assert_eq!((messages.len(), last.as_str()), (0, "0 EPROTO"));
}

#[test]
fn refused_bytes_are_shown_in_hex() {
    let mut refusing = assembler("when 01 (fixed=2)", Limits::default());
    refusing.handle_bytes(b"\x01\xff\x16\x03\x01");
    assert!(matches!(refusing.poll(at(0)), Some(Event::Message(_))));
    match refusing.poll(at(0)) {
        Some(Event::Failed(failure)) => {
            let expected = "at byte 2: EBADMSG: the first bytes match no case of this framing (16 03 01)";
            assert_eq!(failure.to_string(), expected);
        }
        event => panic!("{event:?}"),
    }
    assert_eq!(refusing.poll(at(0)), None);
    assert_eq!(refusing.handle_bytes(b"more"), 0);
    assert_eq!(refusing.rest(), b"\x16\x03\x01");
}

#[test]
fn timers() {
    let limits = Limits {
        head_time: Some(Duration::from_secs(2)),
        body_time: Some(Duration::from_secs(5)),
        rate: 10,
        ..Limits::default()
    };
    let mut idle = assembler("length=2", limits);
    assert_eq!(idle.poll(at(100)), None);
    assert_eq!(idle.poll_timeout(), None, "no message has started");

    // Head timer: from the first byte, not restarted by other progress.
    idle.handle_bytes(b"\0");
    assert_eq!(idle.poll(at(100)), None);
    assert_eq!(idle.poll_timeout(), Some(at(102)));
    assert_eq!(idle.poll(at(101)), None);
    match idle.poll(at(102)) {
        Some(Event::Failed(failure)) => assert_eq!(failure.cause, Cause::Timeout { in_body: false }),
        event => panic!("{event:?}"),
    }

    // Body timer: five seconds, plus one second per ten bytes.
    let mut slow = assembler("length=2", limits);
    slow.handle_bytes(b"\0\x28aaaa");
    assert_eq!(slow.poll(at(100)), None);
    assert_eq!(slow.poll_timeout(), Some(at(109)));
    assert_eq!(slow.need(), 0x28 - 6);
    slow.handle_bytes(&[b'a'; 0x28 - 6]);
    assert!(
        matches!(slow.poll(at(200)), Some(Event::Message(_))),
        "late, but complete before the timer was polled"
    );
    assert_eq!(slow.poll(at(200)), None);
    assert_eq!(slow.poll_timeout(), None);
}

#[test]
fn need_is_the_number_of_missing_bytes() {
    let mut waiting = assembler("offset=2 length=2 adjust=4", Limits::default());
    assert_eq!(waiting.need(), 1);
    waiting.handle_bytes(b"a");
    assert_eq!(waiting.poll(at(0)), None);
    assert_eq!(waiting.need(), 3);
    waiting.handle_bytes(b"b\0\x09cc");
    assert_eq!(waiting.poll(at(0)), None);
    assert_eq!((waiting.need(), waiting.held()), (7, 6));
    waiting.handle_bytes(b"ccccccc!!");
    assert!(matches!(waiting.poll(at(0)), Some(Event::Message(message)) if message.bytes.len() == 13));
    assert_eq!((waiting.held(), waiting.rest()), (2, &b"!!"[..]));
}

/// A client that waits for `100 Continue` sends nothing before it has it.
#[test]
fn a_request_that_expects_an_answer_leaves_before_its_body() {
    // Rows: fields of the request, its body, the parts: what follows them, and their lengths, or a whole message.
    let rows: [(&str, &str, bool); 8] = [
        ("HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5", "hello", true),
        ("HTTP/1.1\r\nContent-Length: 5\r\nexpect: other, 100-Continue", "hello", true),
        ("HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked", "1\r\nx\r\n0\r\n\r\n", true),
        ("HTTP/1.1\r\nExpect: 100-continue", "", false),
        ("HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 0", "", false),
        ("HTTP/1.1\r\nExpect: 100-continued\r\nContent-Length: 5", "hello", false),
        ("HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 5", "hello", false),
        ("HTTP/1.1\r\nContent-Length: 5", "hello", false),
    ];
    for (fields, body, parts) in rows {
        for stream in [true, false] {
            let framing = if stream { "http1 body=stream" } else { "http1" };
            let mut assembler = assembler(framing, Limits { part: 16 << 10, ..Limits::default() });
            let head = format!("PUT / {fields}\r\n\r\n");
            // The requests after it are not concerned.
            for next in ["", "GET / HTTP/1.1\r\nContent-Length: 1\r\n\r\n"] {
                let (head, body) = if next.is_empty() { (&*head, body) } else { (next, "x") };
                let parts = parts && next.is_empty() && stream;
                assembler.handle_bytes(head.as_bytes());
                let first = match assembler.poll(at(0)) {
                    None => None,
                    Some(Event::Message(message)) => Some((message.part, message.bytes.len())),
                    other => panic!("{other:?}"),
                };
                let expected = match () {
                    () if parts => Some((Part::First, head.len())),
                    () if body.is_empty() => Some((Part::Whole, head.len())),
                    () => None,
                };
                assert_eq!(first, expected, "{framing}: {head}");
                if body.is_empty() {
                    continue;
                }
                assembler.handle_bytes(body.as_bytes());
                let Some(Event::Message(message)) = assembler.poll(at(0)) else {
                    panic!("{framing}: {head}")
                };
                let expected =
                    if parts { (Part::Last, body.len()) } else { (Part::Whole, head.len() + body.len()) };
                assert_eq!((message.part, message.bytes.len()), expected, "{framing}: {head}");
            }
            assert!(assembler.poll(at(0)).is_none());
        }
    }
}

#[test]
fn a_gap_inside_a_message_loses_that_message() {
    let mut torn = assembler("length=1", Limits::default());
    torn.handle_bytes(b"\x02a\x08bcd");
    assert!(matches!(torn.poll(at(0)), Some(Event::Message(message)) if message.offset == 0));
    assert_eq!(torn.poll(at(0)), None);
    assert_eq!(torn.handle_gap(2), Gap::Lost { offset: 2, length: 8 });
    torn.handle_bytes(b"g");
    assert_eq!(torn.poll(at(0)), None);
    torn.handle_bytes(b"h\x02z");
    assert!(
        matches!(torn.poll(at(0)), Some(Event::Message(message)) if message.offset == 10 && message.bytes == b"\x02z")
    );
    assert_eq!(torn.handle_gap(1), Gap::Over, "between messages");
    assert_eq!(torn.poll(at(0)), None);
}

#[test]
fn unused_memory_is_freed() {
    let mut big = assembler("length=4", Limits::default());
    big.handle_bytes(&100_000u32.to_be_bytes());
    assert_eq!(big.poll(at(0)), None);
    assert!(big.memory() < 4096, "an announced length reserves no memory");
    big.handle_bytes(&[0; 100_000 - 4]);
    assert!(matches!(big.poll(at(0)), Some(Event::Message(_))));
    big.shrink();
    assert_eq!(big.memory(), 0);
}

/// Framings with streams of their messages.
fn stream() -> impl Strategy<Value = (&'static str, Vec<Vec<u8>>)> {
    let body = || prop::collection::vec(any::<u8>(), 0..300);
    let bodies = || prop::collection::vec(body(), 0..30);
    prop_oneof![
        bodies().prop_map(|bodies| {
            let message = |body: Vec<u8>| [&(body.len() as u16).to_be_bytes()[..], &body].concat();
            ("length=2 be adjust=2", bodies.into_iter().map(message).collect())
        }),
        bodies().prop_map(|bodies| {
            let line = |body: Vec<u8>| {
                let mut line: Vec<u8> = body.into_iter().filter(|byte| *byte != b'\n').collect();
                line.extend_from_slice(b"\r\n");
                line
            };
            ("line", bodies.into_iter().map(line).collect())
        }),
        bodies().prop_map(|bodies| {
            let string = |body: Vec<u8>| [format!("{}:", body.len()).as_bytes(), &body, b","].concat();
            ("netstring", bodies.into_iter().map(string).collect())
        }),
        prop::collection::vec(bodies(), 0..8).prop_map(|commands| {
            let bulk = |body: &Vec<u8>| [format!("${}\r\n", body.len()).as_bytes(), body, b"\r\n"].concat();
            let command = |words: Vec<Vec<u8>>| {
                let words: Vec<u8> = words.iter().flat_map(bulk).chain(*b"*0\r\n").collect();
                let count = words_of(&words);
                [format!("*{count}\r\n").as_bytes(), &words].concat()
            };
            ("resp", commands.into_iter().map(command).collect())
        }),
        prop::collection::vec(bodies(), 0..8).prop_map(|records| {
            let record = |fragments: Vec<Vec<u8>>| {
                let fragment = |body: &Vec<u8>| [&(body.len() as u32).to_be_bytes()[..], body].concat();
                let more: Vec<u8> = fragments.iter().flat_map(fragment).collect();
                [&more[..], b"\x80\0\0\x01x"].concat()
            };
            ("onc-rpc", records.into_iter().map(record).collect())
        }),
    ]
}

/// Number of bulk strings, and of the empty array after them.
fn words_of(words: &[u8]) -> usize {
    let (mut at, mut count) = (0, 0);
    while at < words.len() {
        let end = at + words[at..].iter().position(|byte| *byte == b'\n').expect("a line") + 1;
        let digits = std::str::from_utf8(&words[at + 1..end - 2]).expect("digits");
        at = if words[at] == b'$' { end + digits.parse::<usize>().expect("a number") + 2 } else { end };
        count += 1;
    }
    count
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_segmentation_gives_the_messages((text, messages) in stream(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..60)) {
        let stream = messages.concat();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        for scans in [false, true] {
            let pieces = cuts.windows(2).map(|cut| &stream[cut[0]..cut[1]]);
            let (found, last) = run_by(assembler(text, Limits::default()), pieces, scans);
            prop_assert_eq!(&found, &messages);
            prop_assert_eq!(last, format!("end {} 0", stream.len()));
        }
    }

    #[test]
    fn any_segmentation_of_any_bytes_gives_the_same_result(
        preset in prop::sample::select(crate::framing::PRESETS.iter().map(|preset| preset.name).collect::<Vec<_>>()),
        stream in prop::collection::vec(prop_oneof![any::<u8>(), 0u8..4, Just(b'\n'), Just(b'0')], 0..200),
        size in 1usize..20,
    ) {
        let limits = Limits { message: 4096, ..Limits::default() };
        let whole = run(assembler(preset, limits), [&stream[..]]);
        prop_assert_eq!(run_by(assembler(preset, limits), stream.chunks(size), true), whole.clone());
        prop_assert_eq!(run(assembler(preset, limits), stream.chunks(size)), whole);
    }
}

/// Messages of the stream, put together from their parts, with the number of parts; and the payload.
fn joined(framing: &str, part: usize, stream: &[u8], sizes: &[usize]) -> Vec<(Vec<u8>, Vec<u8>, usize)> {
    // The heads of chunks count: a body of 3,000 bytes in chunks of one byte takes 11 times as much.
    let limits = Limits { part, message: 65536, ..Limits::default() };
    let mut assembler = Assembler::new(framing.parse().expect("a framing"), limits);
    let (mut all, mut rest, mut sizes) =
        (Vec::<(Vec<u8>, Vec<u8>, usize)>::new(), stream, sizes.iter().cycle());
    let mut open = false;
    while !rest.is_empty() {
        let (some, later) = rest.split_at(rest.len().min(*sizes.next().expect("endless")));
        rest = later;
        assert_eq!(assembler.handle_bytes(some), some.len(), "a message in parts needs no more space");
        while let Some(event) = assembler.poll(Time::default()) {
            let Event::Message(message) = event else { panic!("{event:?}") };
            assert_eq!(open, matches!(message.part, Part::Next | Part::Last), "{:?}", message.part);
            open = message.part.more();
            if !matches!(message.part, Part::Next | Part::Last) {
                all.push((Vec::new(), Vec::new(), 0));
            }
            let last = all.last_mut().expect("a message");
            last.0.extend(message.bytes);
            last.1.extend(message.payload);
            last.2 += 1;
            assert!(message.bytes.len() <= 16 * part.max(1) || message.part == Part::Whole);
            assert!(message.part != Part::Next || message.bytes.len() >= part);
        }
    }
    assert!(!open && assembler.held() == 0);
    all
}

proptest! {
    /// Parts change neither the messages nor their payloads, in any segmentation.
    #[test]
    fn parts_are_the_message(
        lengths in prop::collection::vec(0usize..3000, 1..6),
        chunks in prop::collection::vec(1usize..700, 1..8),
        sizes in prop::collection::vec(1usize..900, 1..8),
        part in 1usize..60,
    ) {
        let mut http = Vec::new();
        for length in &lengths {
            let body: Vec<u8> = (0..*length).map(|at| (at * 31 % 251) as u8).collect();
            if length % 2 == 0 {
                http.extend(format!("\r\nPUT /a HTTP/1.1\r\nContent-Length: {length}\r\n\r\n").as_bytes());
                http.extend(body);
                continue;
            }
            http.extend(b"POST /b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n");
            let mut rest = &body[..];
            for size in chunks.iter().cycle() {
                let (some, later) = rest.split_at(rest.len().min(*size));
                http.extend(format!("{:x};x=y\r\n", some.len()).as_bytes());
                http.extend(some);
                http.extend(if some.is_empty() { &b"T: u\r\n\r\n"[..] } else { b"\r\n" });
                if some.is_empty() {
                    break;
                }
                rest = later;
            }
        }
        let short: Vec<u8> =
            lengths.iter().flat_map(|length| [&(*length as u16 + 4).to_be_bytes()[..], &vec![7; *length + 4]].concat()).collect();
        for (framing, stream) in [("http1", &http), ("length=2 be adjust=2 strip=2 trim=3", &short)] {
            let whole = joined(framing, 0, stream, &sizes);
            prop_assert_eq!(whole.len(), lengths.len());
            let parts = joined(&format!("{framing} body=stream"), part, stream, &sizes);
            let strip = |all: &[(Vec<u8>, Vec<u8>, usize)]| all.iter().map(|(a, b, _)| (a.clone(), b.clone())).collect::<Vec<_>>();
            prop_assert_eq!(strip(&whole), strip(&parts));
        }
    }
}
