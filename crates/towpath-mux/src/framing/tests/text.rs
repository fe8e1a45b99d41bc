//! Text protocols: streams of real clients and servers, and streams that two parsers could read differently.

use super::*;
use crate::Time;
use crate::assembler::{Assembler, Event, Limits};

/// Messages as text with their payload and mark, then the end. Raw messages are joined, because they are what arrived.
fn events(preset: &str, pieces: &[&[u8]]) -> Vec<String> {
    let framing = Framing::parse(preset).unwrap_or_else(|error| panic!("{preset}: {error}"));
    let mut assembler = Assembler::new(framing, Limits { message: 1 << 20, ..Limits::default() });
    let mut events = Vec::new();
    let mut raw = Vec::new();
    let mut drain = |assembler: &mut Assembler| {
        while let Some(event) = assembler.poll(Time::default()) {
            match event {
                Event::Message(message) if preset == "http1" && message.mark == http1::RAW => {
                    raw.extend_from_slice(message.bytes);
                }
                Event::Message(message) => {
                    let mark =
                        if message.mark > 0 { format!(" mark {}", message.mark) } else { String::new() };
                    let payload = message.payload.escape_ascii().to_string();
                    events.push(format!(
                        "{} of {}{mark}: {payload}",
                        message.payload.len(),
                        message.bytes.len()
                    ));
                }
                Event::GiveBack { offset, .. } => events.push(format!("give back at {offset}")),
                Event::Failed(failure) => events.push(format!("at {}: {}", failure.offset, failure.cause)),
                Event::End { inside: 0, .. } => {}
                Event::End { inside, .. } => events.push(format!("{inside} bytes of a message")),
            }
        }
    };
    for piece in pieces {
        let took = assembler.handle_bytes(piece);
        drain(&mut assembler);
        assembler.handle_bytes(&piece[took..]);
        drain(&mut assembler);
    }
    assembler.handle_end();
    drain(&mut assembler);
    if !raw.is_empty() {
        events.push(format!("raw: {}", raw.escape_ascii()));
    }
    events
}

/// The lengths of the messages of a stream, then how it ends. All cuts in two, and byte by byte, give the same.
fn check(preset: &str, stream: &[u8], lengths: &[usize], then: &str) {
    let whole = events(preset, &[stream]);
    let got: Vec<usize> = whole
        .iter()
        .filter(|event| event.starts_with(|c: char| c.is_ascii_digit()) && !event.ends_with("a message"))
        .filter_map(|event| event.split_once(" of ")?.1.split([':', ' ']).next()?.parse().ok())
        .collect();
    let shown = stream.escape_ascii();
    assert_eq!(got, lengths, "{preset}: {shown}: {whole:?}");
    let rest: Vec<_> = whole[lengths.len()..].iter().map(String::as_str).collect();
    assert_eq!(rest.join("; "), then, "{preset}: {shown}");
    for cut in 0..=stream.len() {
        let (before, after) = stream.split_at(cut);
        assert_eq!(events(preset, &[before, after]), whole, "{preset} cut at {cut}: {shown}");
    }
    let single: Vec<_> = stream.chunks(1).collect();
    assert_eq!(events(preset, &single), whole, "{preset} byte by byte: {shown}");
}

#[test]
fn http_messages() {
    let rows: &[(&str, &[usize], &str)] = &[
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.0\r\n\r\n", &[27, 19], ""),
        ("POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhelloGET / HTTP/1.1\r\n\r\n", &[43, 18], ""),
        ("POST / HTTP/1.1\r\ncontent-length:\t5 \r\nContent-Length: 5\r\n\r\nhello", &[63], ""),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n00\r\n\r\n", &[63], ""),
        (
            "POST / HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\nA;x=\"y\"\r\n0123456789\r\n0 ; z\r\nX: y\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            &[83, 18],
            "",
        ),
        // An empty line before a request.
        ("\r\nGET / HTTP/1.1\r\n\r\n", &[20], ""),
        ("POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx", &[61], ""),
        ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", &[25, 40], ""),
        ("HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 304 x\r\nContent-Length: 9\r\n\r\n", &[27, 37], ""),
        ("HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", &[56], ""),
        // The connection leaves HTTP.
        (
            "GET / HTTP/1.1\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n\u{81}\u{5}GET / HTTP/1.1\r\n\r\n",
            &[71],
            r"raw: \xc2\x81\x05GET / HTTP/1.1\r\n\r\n",
        ),
        ("CONNECT a:1 HTTP/1.1\r\n\r\nabc", &[24], "raw: abc"),
        ("HTTP/1.1 101 Switching Protocols\r\n\r\nab", &[36], "raw: ab"),
        ("HTTP/1.0 200 OK\r\n\r\nto the end", &[19], "raw: to the end"),
        // These upgrades do not take place.
        ("GET / HTTP/1.1\r\nUpgrade: x\r\n\r\nGET / HTTP/1.1\r\n\r\n", &[30, 18], ""),
        (
            "GET / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: upgrade, HTTP2-Settings\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            &[69, 18],
            "",
        ),
        ("GET / HTTP/1.0\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nGET / HTTP/1.1\r\n\r\n", &[51, 18], ""),
        ("GET / HTTP/1.1\r\nHost:", &[], "21 bytes of a message"),
    ];
    for (stream, lengths, then) in rows {
        check("http1", stream.as_bytes(), lengths, then);
    }
}

#[test]
fn http_that_two_parsers_read_differently_is_refused() {
    let rows: &[(&[u8], &str)] = &[
        (
            b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            "both Content-Length and Transfer-Encoding",
        ),
        (
            b"POST / HTTP/1.1\r\nContent-Length: 5\r\ncontent-length: 6\r\n\r\n",
            "two different values of Content-Length",
        ),
        (b"POST / HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\n", "a Content-Length that is not one number"),
        (b"POST / HTTP/1.1\r\nContent-Length: +5\r\n\r\n", "a Content-Length that is not one number"),
        (b"POST / HTTP/1.1\r\nContent-Length: 0x5\r\n\r\n", "a Content-Length that is not one number"),
        (b"POST / HTTP/1.1\r\nContent-Length:\r\n\r\n", "a Content-Length that is not one number"),
        (
            b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
            "a Content-Length that is not one number",
        ),
        (
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n",
            "a Transfer-Encoding other than chunked alone",
        ),
        (
            b"POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n",
            "a Transfer-Encoding other than chunked alone",
        ),
        (
            b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            "a Transfer-Encoding other than chunked alone",
        ),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", "a Transfer-Encoding in HTTP/1.0"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", "a folded line in the head"),
        (b"GET / HTTP/1.1\r\nContent-Length : 5\r\n\r\n", "a line of the head that is no field"),
        (b"GET / HTTP/1.1\r\nnonsense\r\n\r\n", "a line of the head that is no field"),
        (b"GET / HTTP/1.1\nHost: a\r\n\r\n", "a LF without CR in the head"),
        (b"GET / HTTP/1.1\r\nHost: a\n\r\n", "a LF without CR in the head"),
        (b"GET / HTTP/1.1\r\nHost: a\rContent-Length: 1\r\n\r\n", "a CR without LF in the head"),
        (b"GET / HTTP/1.1\r\nHost: \0\r\n\r\n", "a control character in the head"),
        (b"GET / HTTP/2.0\r\n\r\n", "not HTTP/1.0 or HTTP/1.1"),
        (b"GET /\r\n\r\n", "the first line is not that of an HTTP/1 request or response"),
        (b"GET  / HTTP/1.1\r\n\r\n", "the first line is not that of an HTTP/1 request or response"),
        (b"\r\n\r\n", "the first line is not that of an HTTP/1 request or response"),
        (b"CONNECT a:1 HTTP/1.1\r\nContent-Length: 1\r\n\r\n", "a CONNECT request with a body"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "a status that is not three digits"),
        (b"\x16\x03\x01\x02\x00", "a control character in the head"),
    ];
    for (stream, reason) in rows {
        check("http1", stream, &[], &format!("at 0: EBADMSG: {reason}"));
    }
    let head = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
    let rows = [
        ("5\nhello\r\n0\r\n\r\n", "a LF without CR before a chunk"),
        ("x\r\n", "a chunk whose size is not a hexadecimal number"),
        ("0x5\r\nhello\r\n", "a chunk whose size is not a hexadecimal number"),
        ("-1\r\n", "a chunk whose size is not a hexadecimal number"),
        ("\r\n", "a chunk whose size is not a hexadecimal number"),
        ("00000000000000005\r\n", "a chunk whose size is not a hexadecimal number"),
        ("5 5\r\nhello\r\n", "a chunk whose size is not a hexadecimal number"),
        ("5\rhello\r\n", "a chunk whose size is not a hexadecimal number"),
        ("5\r\nhelloGET", "a chunk that does not end with CR LF"),
        ("0\r\nContent-Length: 5\r\n\r\n", "a length among the trailers"),
        ("0\r\n x\r\n\r\n", "a folded line in the head"),
    ];
    for (body, reason) in rows {
        check("http1", format!("{head}{body}").as_bytes(), &[], &format!("at 0: EBADMSG: {reason}"));
    }
}

#[test]
fn lengths_beyond_the_limits_are_refused() {
    let too_big = |length: &str| format!("at 0: EMSGSIZE: {length} exceeds the limit of 1048576");
    let unknown = "at 0: EMSGSIZE: no end of the message within 1048576 bytes".to_owned();
    check(
        "http1",
        b"POST / HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n",
        &[],
        &too_big("a message of 1048620 bytes"),
    );
    check(
        "http1",
        b"POST / HTTP/1.1\r\nContent-Length: 9999999999999999999\r\n\r\n",
        &[],
        "at 0: EMSGSIZE: a message of 9999999999999999999 bytes exceeds the limit of 1099511627776",
    );
    check("http1", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n", &[], &unknown);
    check(
        "http1",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        &[],
        "at 0: EMSGSIZE: a message of 18446744073709551615 bytes exceeds the limit of 1099511627776",
    );
    check("memcached-text", b"set a 0 0 2000000\r\n", &[], &unknown);
    let max = 16 << 20;
    check(
        "memcached-text",
        b"set a 0 0 18446744073709551615\r\n",
        &[],
        &format!("at 0: EMSGSIZE: a message of 18446744073709551615 bytes exceeds the limit of {max}"),
    );
    check("smtp", b"BDAT 1048576\r\n", &[], &too_big("a message of 1048590 bytes"));
    for (preset, byte, max) in
        [("http1", b'a', 65536), ("memcached-text", b'a', 65536), ("smtp", b'a', 12288)]
    {
        let step = Framing::preset(preset).unwrap().step(&vec![byte; max], &mut State::default());
        let refused = matches!(step, Step::Error(Cause::TooBig { .. } | Cause::HeadTooBig { .. }));
        assert!(refused || step == Step::Need(max + 1), "{preset}: {step:?}");
        let step = Framing::preset(preset).unwrap().step(&vec![byte; max + 1], &mut State::default());
        assert!(matches!(step, Step::Error(_)), "{preset}: {step:?}");
    }
    let line = [&b"set "[..], &vec![b'a'; 70_000]].concat();
    let step = Framing::preset("memcached-text").unwrap().step(&line, &mut State::default());
    assert_eq!(step, Step::Error(Cause::HeadTooBig { max: 65536 }));
}

#[test]
fn commands_with_counted_payloads() {
    let rows: &[(&str, &str, &[usize], &str)] = &[
        ("memcached-text", "get a\r\nset a 0 0 5\r\nhe\r\no\r\ngets a b\nquit\r\n", &[7, 20, 9, 6], ""),
        ("memcached-text", "cas a 0 0 1 77 noreply\r\nx\r\nprepend  k 1 2  0\r\n\r\n", &[27, 21], ""),
        ("memcached-text", "ms k 2 T0 c\r\nhi\r\nmg k v\r\nmn\r\n", &[17, 8, 4], ""),
        (
            "memcached-text",
            "VALUE a 0 5\r\nEND\r\n\r\nEND\r\nVA 1 t\r\nx\r\nSTORED\r\n12\r\n",
            &[20, 5, 11, 8, 4],
            "",
        ),
        ("memcached-text", "set a 0 0 -1\r\n", &[], "at 0: EBADMSG: the count is not a decimal number"),
        ("memcached-text", "set a 0 0\r\n", &[], "at 0: EBADMSG: the count is not a decimal number"),
        // A tab is part of memcached's keys.
        ("memcached-text", "set a\tb 0 0 1\r\nx\r\n", &[18], ""),
        (
            "memcached-text",
            "set a 0 0 1\r\nxyz",
            &[],
            "at 0: EBADMSG: the message does not end with its end mark",
        ),
        (
            "nats",
            "CONNECT {}\r\npub a.b 5\r\nPUB x\r\nPUB a inbox 0\r\n\r\nSUB a 1\r\nPING\r\n",
            &[12, 18, 17, 9, 6],
            "",
        ),
        ("nats", "HPUB a 12 14\r\nNATS/1.0\r\n\r\nhi\r\n-ERR 'x'\r\n+OK\r\n", &[30, 10, 5], ""),
        (
            "nats",
            "MSG a 1 reply\t2\r\nhi\r\nPUB a x\r\n",
            &[21],
            "at 21: EBADMSG: the count is not a decimal number",
        ),
        ("nats", "GET / HTTP/1.1\r\n", &[], "at 0: EBADMSG: the first bytes match no case of this framing"),
        (
            r#"delimiter="\r\n\r\n" header="Content-Length" header=l strip=head"#,
            "content-length: 2\r\nX: y\r\n\r\nabL : 1\r\n\r\nx",
            &[29, 10],
            "",
        ),
        (
            r#"delimiter="\r\n\r\n" header="Content-Length:""#,
            "A: b\r\n\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            &[8],
            "at 8: EBADMSG: two different counts in the head",
        ),
        (
            "rtsp",
            "OPTIONS * RTSP/1.0\r\nCSeq: 1\r\n\r\n$\0\0\u{3}abcRTSP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nx=y",
            &[31, 7, 41],
            "",
        ),
        ("rtp-over-tcp", "\0\u{2}ab\0\0", &[4, 2], ""),
    ];
    for (framing, stream, lengths, then) in rows {
        check(framing, stream.as_bytes(), lengths, then);
    }
}

#[test]
fn mails() {
    let rows: &[(&str, &[usize], &str)] = &[
        ("EHLO a\r\nDATA\r\nSubject: x\r\n\r\n..dot\r\n.\r\nQUIT\r\n", &[8, 6, 24, 6], ""),
        ("data\r\n.\r\nNOOP\r\n", &[6, 3, 6], ""),
        ("DATA\r\na\r\n.\r\nDATA\r\n.\r\n", &[6, 6, 6, 3], ""),
        ("BDAT 3\r\na\0\nBDAT 0 LAST\r\nRSET\r\n", &[11, 13, 6], ""),
        ("250-a\r\n250-b\r\n250 c\r\n354 go\r\n", &[21, 8], ""),
        ("STARTTLS\r\n\u{16}\u{3}\u{1}", &[10], "give back at 10"),
        ("DATA\r\na\n.\nMAIL FROM:<x>\r\n", &[6], "at 6: EBADMSG: a CR or LF alone in a mail"),
        ("DATA\r\na\r\n.\nMAIL\r\n", &[6], "at 6: EBADMSG: a CR or LF alone in a mail"),
        ("DATA\r\na\r.\r\n", &[6], "at 6: EBADMSG: a CR or LF alone in a mail"),
        ("EHLO a\n", &[], "at 0: EBADMSG: a line that ends with LF only"),
        ("BDAT x\r\n", &[], "at 0: EBADMSG: BDAT without a decimal number"),
        ("EHLO \0\r\n", &[], "at 0: EBADMSG: a command with a NUL"),
        ("250-a\r\nEHLO\r\n", &[], "at 0: EBADMSG: a reply that ends with another line"),
    ];
    for (stream, lengths, then) in rows {
        check("smtp", stream.as_bytes(), lengths, then);
    }
    let mail = events("smtp", &[b"DATA\r\nx\r\n.\r\nBDAT 1\r\ny"]);
    assert_eq!(mail[1..], ["3 of 6 mark 1: x\\r\\n", "9 of 9 mark 2: BDAT 1\\r\\ny"]);
}

#[test]
fn presets_are_extended() {
    let hash = |text: &str, stream: &[u8]| match Framing::parse(text)
        .unwrap_or_else(|error| panic!("{text}: {error}"))
        .step(stream, &mut State::default())
    {
        Step::Message(message) => message.hash,
        step => panic!("{text}: {step:?}"),
    };
    let foo = body::hash(b"foo");
    let rows: &[(&str, &[u8], u32)] = &[
        ("resp key=1", b"*3\r\n$3\r\nSET\r\n$3\r\nfoo\r\n$1\r\n1\r\n", foo),
        ("redis key=1", b"*2\r\n$3\r\nGET\r\n$3\r\nfoo\r\n", foo),
        ("resp key=1", b"GET foo\r\n", foo),
        ("resp key=0", b"*1\r\n$3\r\nfoo\r\n", foo),
        ("resp key=1", b"*1\r\n$4\r\nPING\r\n", 0),
        ("resp key=1", b"+foo\r\n", 0),
        ("memcached-text key=1", b"set foo 0 0 1\r\nx\r\n", foo),
        ("memcached-text key=1", b"get foo\r\n", foo),
        ("memcached-text key=1", b"version\r\n", 0),
        ("nats key=1", b"PUB foo 1\r\nx\r\n", foo),
        ("http1 key=1", b"GET foo HTTP/1.1\r\n\r\n", foo),
        ("kafka key=4:3 max=1M", b"\0\0\0\x03foo", foo),
        ("mysql key=4:3", b"\x03\0\0\x01foo", foo),
    ];
    for (text, stream, expected) in rows {
        assert_eq!(hash(text, stream), *expected, "{text}: {}", stream.escape_ascii());
        assert!(Framing::parse(text).unwrap().may_have_key());
    }
    // The bytes of the key may arrive after the length.
    let mysql = Framing::parse("mysql key=4:3").unwrap();
    let mut state = State::default();
    assert_eq!(mysql.step(b"\x03\0\0\x01", &mut state), Step::Need(7));
    assert!(
        matches!(mysql.step(b"\x03\0\0\x01foo", &mut state), Step::Message(message) if message.hash == foo)
    );

    let too_big = |max| Step::Error(Cause::TooBig { length: None, max });
    let long = vec![b'a'; 100_000];
    assert_eq!(Framing::parse("line").unwrap().step(&long, &mut State::default()), too_big(65536));
    assert_eq!(
        Framing::parse("line max=1M").unwrap().step(&long, &mut State::default()),
        Step::Need(100_001)
    );
    assert_eq!(
        Framing::parse("resp max=8").unwrap().step(b"$9\r\n", &mut State::default()),
        Step::Error(Cause::TooBig { length: None, max: 8 })
    );
    assert_eq!(Framing::parse("kafka mark=7").unwrap().name(), "kafka mark=7");
    let toml = Framing::from_toml("preset = 'line'\nmax = '1M'\n").unwrap();
    assert_eq!(toml.step(&long, &mut State::default()), Step::Need(100_001));

    let rows = [
        ("resp length=4", "column 6: length cannot extend resp, only key, max can"),
        (
            "kafka keys=4:3",
            "column 7: keys cannot extend kafka, only key, mark, max, min, head, strip, trim, body can; did you mean \"key\"?",
        ),
        ("mysql key=1", "column 7: mysql-packet has no words; write offset:length: key=8:4"),
        ("kafka key=1", "column 7: a word as the key needs a delimiter; write offset:length: key=8:4"),
        (
            "resp body=stream",
            "column 6: body=stream needs a framing that knows the length of a message before its end: http1, or a length field or count without tail",
        ),
        ("http1 body=parts", "column 7: body must be stream (long messages in parts) or whole (the default)"),
        ("http1 body=stream body=whole", "column 19: body is given twice"),
        (
            "length=4 tail=\"x\" body=stream",
            "column 19: body=stream needs a framing that knows the length of a message before its end: http1, or a length field or count without tail",
        ),
        (
            "when 01 (length=4 body=stream)",
            "column 19: body applies to the whole framing: write it outside of the brackets",
        ),
        ("line max=1 max=2", "column 12: max is given twice"),
        ("lien max=1", "column 1: unknown preset \"lien\"; did you mean \"line\"?"),
        ("delimiter=\"x\" count=a", "column 15: count must be a word's number, 0 to 255, or last"),
        ("delimiter=\"x\" count=1 header=a", "column 23: count and header both give the count: use one"),
        ("length=4 count=1", "column 10: count needs delimiter and cannot be used with length"),
        ("delimiter=\"x\" head=4", "column 15: head needs count or header"),
        (
            "delimiter=\"x\" header=\"a b\"",
            "column 15: header needs a field's name: header=\"Content-Length\"",
        ),
        (
            "delimiter=\"x\" count=1 mask=1",
            "column 23: mask needs a length field and cannot be used with count",
        ),
    ];
    for (text, expected) in rows {
        assert_eq!(Framing::parse(text).expect_err(text).to_string(), expected, "{text}");
    }
    let error = Framing::from_toml("max = 1\npreset = 'lien'\n").unwrap_err();
    assert_eq!(error.to_string(), "2:11: unknown preset \"lien\"; did you mean \"line\"?");
}
