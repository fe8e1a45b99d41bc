//! Hand-made streams for each preset.

use super::*;

/// Preset, stream (hex, text in quotes), lengths, following step.
type Row = (&'static str, &'static str, &'static [usize], Option<Step>);

const TLS_HELLO: &str = "16 0301 0002 0100";

fn rows() -> Vec<Row> {
    let malformed = |reason| Some(Step::Error(Cause::malformed(reason)));
    let foreign = || malformed("the first bytes match no case of this framing");
    vec![
        ("amqp091", "'AMQP' 00000901  01 0000 00000002 aabb ce  08 0000 00000000 ce", &[8, 10, 8], None),
        ("amqp091", "01 0000 00000000 cd", &[], malformed("the message does not end with its end mark")),
        (
            "bgp",
            "ffffffffffffffffffffffffffffffff 0013 04 ffffffffffffffffffffffffffffffff 0015 03 0101",
            &[19, 21],
            None,
        ),
        (
            "bgp",
            "ffffffffffffffffffffffffffffffff 0012 04",
            &[],
            Some(Step::Error(Cause::BadLength { length: 18, least: 19 })),
        ),
        ("bgp", "feff", &[], foreign()),
        ("cassandra4", "04 00 0001 05 00000002 aabb 84 00 0001 06 00000000", &[11, 9], None),
        ("cassandra4", "02 00 01 05 00000001 aa", &[9], None),
        ("cassandra4", "06", &[], malformed("not a version of CQL's protocol (1 to 5)")),
        // OPTIONS, STARTUP, and a segment whose first byte looks like version 5.
        (
            "cassandra4",
            "05 00 0001 05 00000000 05 00 0002 01 00000002 0000 050002 aabbcc",
            &[9, 11],
            Some(Step::GiveBack),
        ),
        // SUPPORTED, AUTHENTICATE, a segment.
        (
            "cassandra4",
            "85 00 0001 06 00000000 85 00 0002 03 00000001 aa 8500020000",
            &[9, 10],
            Some(Step::GiveBack),
        ),
        // The beta of version 5 and version 4 have no segments.
        ("cassandra4", "05 10 0001 01 00000000 05 10 0002 07 00000000", &[9, 9], None),
        ("cassandra4", "84 00 0001 02 00000000 84 00 0002 08 00000000", &[9, 9], None),
        ("diameter", "01 000014 80000101 00000000 00000000 00000000", &[20], None),
        ("dnp3", "0564 05 c0 0100 0000 aaaa 0564 08 44 0100 0000 aaaa 010203 bbbb", &[10, 15], None),
        ("dnp3", "0565", &[], malformed("a DNP3 frame that does not start with 05 64")),
        ("dns-tcp", "0002 aabb 000c 000000000000000000000000", &[4, 14], None),
        ("doip", "02fd 0005 00000001 aa", &[9], None),
        (
            "http2-frame",
            "'PRI * HTTP/2.0' 0d0a0d0a 'SM' 0d0a0d0a 000000 04 00 00000000 000002 00 01 00000001 aabb",
            &[24, 9, 11],
            None,
        ),
        ("http2-frame", "'HTTP/1.1 101 Switching Protocols' 0d0a0d0a 000000 04 00 00000000", &[36, 9], None),
        ("http1", "'GET / HTTP/1.1' 0d0a0d0a 'HTTP/1.1 204 x' 0d0a0d0a", &[18, 18], None),
        ("iec104", "68 04 07000000 68 05 0000000001", &[6, 7], None),
        ("kafka", "00000003 aabbcc 00000000", &[7, 4], None),
        ("kerberos-tcp", "00000001 6a", &[5], None),
        ("ldap", "300c 020101 6007 020103 0400 8000 30840000000302 0101", &[14, 9], None),
        ("ldap", "00000002 aabb", &[6], None),
        ("ldap", "3000 16 0303", &[2], Some(Step::GiveBack)),
        ("ldap", "1604", &[], foreign()),
        ("line", "'one' 0d0a 'two' 0a 0a", &[5, 4, 1], None),
        ("memcached-binary", "80 00 0001 00 00 0000 00000001 00000000 0000000000000000 61", &[25], None),
        ("memcached-binary", "'get x'", &[], foreign()),
        ("memcached-text", "'get x' 0d0a 'set x 0 0 1' 0d0a 'y' 0d0a", &[7, 16], None),
        ("modbus-tcp", "0001 0000 0006 01 03 0000 0001", &[12], None),
        ("mongodb", "12000000 01000000 00000000 dd070000 aabb", &[18], None),
        ("mongodb", "0f000000", &[], Some(Step::Error(Cause::BadLength { length: 15, least: 16 }))),
        ("mqtt", "c000 d000 30 03 0001 61 30 8001", &[2, 2, 5], Some(Step::from(131))),
        ("mqtt", "10 ffffffff", &[], malformed("a variable-length number that does not end")),
        ("mysql-packet", "030000 00 0a3500 010000 01 00", &[7, 5], None),
        ("mysql-packet", "030000 00 0a3500 16 0303 0010", &[7], Some(Step::GiveBack)),
        (
            "mysql-packet",
            "200000 01 05ae0f0000000001 21 0000000000000000000000000000000000000000000000 16 0301 0010",
            &[36],
            Some(Step::GiveBack),
        ),
        // A login that requests compression; a query: plain, uncompressed in a compressed packet, by zlib, by
        // zstd.
        ("mysql-packet", "050000 01 20a20000ff 050000 00 0353454c45", &[9, 9], None),
        ("mysql-packet", "050000 01 20a20000ff 010000 00 0e", &[9, 5], None),
        (
            "mysql-packet",
            "050000 01 20a20000ff 020000 03 aabb 090000 00 000000 050000 00 0353454c45",
            &[9, 6],
            Some(Step::GiveBack),
        ),
        (
            "mysql-packet",
            "050000 01 00a20000ff 090000 00 000000 050000 00 0353454c45",
            &[9, 13],
            Some(Step::Need(4)),
        ),
        (
            "mysql-packet",
            "050000 01 20a20000ff 090000 00 400000 789c 00000000000000",
            &[9],
            Some(Step::GiveBack),
        ),
        (
            "mysql-packet",
            "050000 01 00a20004ff 090000 00 400000 28b5 2ffd0000000000",
            &[9],
            Some(Step::GiveBack),
        ),
        // A server's greeting, more of the handshake, OK, and responses to plain and compressed commands.
        (
            "mysql-packet",
            "030000 00 0a3500 020000 02 0104 070000 03 00000002000000 070000 01 00000002000000 010000 01 02",
            &[7, 6, 11, 11, 5],
            None,
        ),
        (
            "mysql-packet",
            "030000 00 0a3500 070000 02 00000002000000 0b0000 01 000000 070000 01 00000002000000",
            &[7, 11],
            Some(Step::GiveBack),
        ),
        (
            "mysql-packet",
            "030000 00 0a3500 070000 02 00000002000000 0b0000 01 500000 785e 000000000000000000",
            &[7, 11],
            Some(Step::GiveBack),
        ),
        ("mysql-packet", "ffffff 00 00000000", &[], Some(Step::Need(0x0100_0003 + 3))),
        ("nats", "'PUB a 1' 0d0a 'x' 0d0a 'PING' 0d0a", &[12, 6], None),
        ("nbss", "00 000004 ff534d42 85 000000", &[8, 4], None),
        ("netstring", "'5:hello,0:,'", &[8, 3], None),
        ("netstring", "'5:hello;'", &[], malformed("the message does not end with its end mark")),
        ("onc-rpc", "80000004 00000001 00000002 aabb 80000001 cc", &[8, 11], None),
        ("opcua", "'HELF' 08000000", &[8], None),
        ("openflow", "01 00 0008 00000001 04 00 0008 00000001", &[8, 8], None),
        ("openwire", "00000002 1e00", &[6], None),
        // SSLRequest refused, startup, query, terminate.
        (
            "postgres-frontend",
            "00000008 04d2162f 00000009 00030000 00 51 00000006 6100 58 00000004",
            &[8, 9, 7, 5],
            None,
        ),
        ("postgres-frontend", "00000008 04d2162f 16 0301", &[8], Some(Step::GiveBack)),
        ("postgres-frontend", "00000008 04d21630 00000009 00030000 00", &[8, 9], None),
        ("postgres-frontend", "00000008 04d21630 00000040 60820100", &[8], Some(Step::GiveBack)),
        ("postgres-frontend", "00000008 00ff00ff", &[8], None),
        ("postgres-frontend", "00000007 000300", &[], Some(Step::Need(8))),
        ("postgres-frontend", "'GET /'", &[], malformed("not a message type of a PostgreSQL client")),
        ("postgres-backend", "'N' 52 00000008 00000000 5a 00000005 49", &[1, 9, 6], None),
        ("postgres-backend", "'S' 16 0303", &[1], Some(Step::GiveBack)),
        ("postgres-backend", "16 0303", &[], Some(Step::GiveBack)),
        ("postgres-backend", "52 00000008 00000000 53 00000006 6100", &[9, 7], None),
        ("postgres-backend", "45 00000003", &[], Some(Step::Error(Cause::BadLength { length: 4, least: 5 }))),
        ("rdp", "0300 0007 02f080 00 05 aabbcc 44 8004 aa", &[7, 5, 4], None),
        ("rdp", "0300 0007 02f080 16 0303", &[7], Some(Step::GiveBack)),
        (
            "resp",
            "'*2' 0d0a '$4' 0d0a 'ECHO' 0d0a '$2' 0d0a 'hi' 0d0a '+OK' 0d0a '$-1' 0d0a '*-1' 0d0a '*0' 0d0a",
            &[22, 5, 5, 5, 4],
            None,
        ),
        ("resp", "'PING' 0d0a 0d0a 'quit' 0a ':1' 0d0a", &[6, 2, 5, 4], None),
        ("resp", "'*2' 0d0a '*1' 0d0a ':1' 0d0a '%1' 0d0a '+a' 0d0a '_' 0d0a", &[23], None),
        ("resp", "'|1' 0d0a '+ttl' 0d0a ':9' 0d0a '+v' 0d0a '>1' 0d0a '+m' 0d0a", &[18, 8], None),
        ("resp", "'$3' 0d0a 'abcd' 0d0a", &[], malformed("a bulk string that does not end with CR LF")),
        ("resp", "'*1' 0d0a 'PING' 0d0a", &[], malformed("neither a RESP type nor an inline command")),
        ("resp", "'$x' 0d0a", &[], malformed("a RESP count that is not a number")),
        ("resp", "'$5' 0d0a 'ab'", &[], Some(Step::Need(11))),
        ("rtp-over-tcp", "0002 8000 0000", &[4, 2], None),
        ("rtsp", "24 00 0001 aa 'RTSP/1.0 200 OK' 0d0a0d0a", &[5, 19], None),
        ("smpp", "00000010 00000015 00000000 00000001", &[16], None),
        ("smtp", "'DATA' 0d0a '.' 0d0a '250 ok' 0d0a", &[6, 3, 8], None),
        ("synphasor", "aa01 0012 003c 00000000 00000000 0000 0000", &[18], None),
        ("syslog", "'5 <1>ab<1>cd' 0a '2 ' 0000", &[7, 6, 4], None),
        ("thrift-framed", "00000004 80010001", &[8], None),
        (
            "thrift-framed",
            "80010001",
            &[],
            malformed("Thrift's binary protocol without the framed transport"),
        ),
        ("tls-record", "16 0301 0002 0100 17 0303 0001 aa", &[7, 6], None),
        ("tls-record", "8003 01 0301", &[5], None),
        ("tls-record", "'GET '", &[], foreign()),
        ("tpkt", "0300 0007 02f080", &[7], None),
        ("tpkt", "0300 0007 02f080 16 0301", &[7], Some(Step::GiveBack)),
        ("websocket", "'POST /'", &[], malformed("a reserved bit of a WebSocket frame")),
        ("websocket", "c1 01 61 87 00", &[3], malformed("a reserved opcode of WebSocket")),
        ("websocket", "0b 00", &[], malformed("a reserved opcode of WebSocket")),
        ("websocket", "'HTTP/1.1 400 Bad Request'", &[], malformed("the server did not switch to WebSocket")),
        (
            "websocket",
            "'GET / HTTP/1.1' 0d0a0d0a 81 82 00000000 aabb 81 fe 0001 00000000 aa 8a 80 00000000",
            &[18, 8, 9, 6],
            None,
        ),
        (
            "websocket",
            "'HTTP/1.1 101 x' 0d0a0d0a 81 02 6869 82 7e 0001 aa 82 7f 0000000000000001 aa",
            &[18, 4, 5, 11],
            None,
        ),
    ]
}

/// Parses hex digits and text in single quotes.
fn bytes(written: &str) -> Vec<u8> {
    let part = |(at, part): (usize, &str)| if at % 2 == 0 { hex(part) } else { part.as_bytes().to_vec() };
    written.split('\'').enumerate().flat_map(part).collect()
}

#[test]
fn streams_made_by_hand() {
    for (preset, stream, expected, then) in rows() {
        let framing = Framing::preset(preset).unwrap();
        let (lengths, rest) = lengths(&framing, &bytes(stream));
        assert_eq!((lengths.as_slice(), &rest), (expected, &then), "{preset}: {stream}");
    }
}

#[test]
fn every_preset_has_a_stream() {
    for preset in PRESETS {
        assert!(rows().iter().any(|row| row.0 == preset.name), "{} has no row", preset.name);
    }
}

/// Every cut in two parts, and byte by byte, gives the same messages and the same end.
#[test]
fn any_cut_gives_the_same_result() {
    use crate::Time;
    use crate::assembler::{Assembler, Event, Limits};

    fn run(framing: &Framing, pieces: &[&[u8]]) -> Vec<String> {
        let mut assembler = Assembler::new(framing.clone(), Limits::default());
        let mut events = Vec::new();
        let mut drain = |assembler: &mut Assembler| {
            while let Some(event) = assembler.poll(Time::default()) {
                events.push(match event {
                    Event::Message(message) => format!("{message:?}"),
                    Event::GiveBack { offset, .. } => format!("give back at {offset}"),
                    Event::Failed(failure) => format!("at {}: {}", failure.offset, failure.cause),
                    Event::End { offset, inside, .. } => format!("end at {offset}, {inside} inside"),
                });
            }
        };
        for piece in pieces {
            assembler.handle_bytes(piece);
            drain(&mut assembler);
        }
        assembler.handle_end();
        drain(&mut assembler);
        events
    }

    for (preset, stream, ..) in rows() {
        let framing = Framing::preset(preset).unwrap();
        let stream = bytes(stream);
        let whole = run(&framing, &[&stream]);
        for cut in 0..=stream.len() {
            let (before, after) = stream.split_at(cut);
            assert_eq!(run(&framing, &[before, after]), whole, "{preset} cut at {cut}");
        }
        let single: Vec<_> = stream.chunks(1).collect();
        assert_eq!(run(&framing, &single), whole, "{preset} byte by byte");
    }
}

#[test]
fn midstream_server_bytes_are_not_an_ssl_answer() {
    let framing = Framing::preset("postgres-backend").unwrap();
    let stream = hex("53 00000006 6100");
    let mut state = State { midstream: true, ..State::default() };
    assert_eq!(framing.step(&stream, &mut state), Step::from(7));
    assert_eq!(framing.step(&stream, &mut State::default()), Step::from(1));
}

#[test]
fn a_tls_hello_is_not_a_database_message() {
    for preset in ["postgres-frontend", "ldap", "bgp", "resp"] {
        let step = Framing::preset(preset).unwrap().step(&hex(TLS_HELLO), &mut State::default());
        assert!(matches!(step, Step::Error(_) | Step::GiveBack), "{preset}: {step:?}");
    }
}
