//! Tables of segments with the expected stream events, and a property test: segments in any order give the sent stream.

use proptest::prelude::*;
use towpath_wire::{self as wire, LinkType};

use super::*;

const PSH: u8 = 0x08;

/// A segment from one end (0 or 1) of a connection between two ports.
fn segment(from: u8, flags: u8, seq: u32, ack: u32, payload: &[u8]) -> Vec<u8> {
    let (src, dst) = if from == 0 { (4242u16, 80u16) } else { (80, 4242) };
    let length = (40 + payload.len()) as u16;
    let mut bytes = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 192, 0, 2, 1 + from, 192, 0, 2, 2 - from];
    bytes[2..4].copy_from_slice(&length.to_be_bytes());
    bytes.extend(src.to_be_bytes());
    bytes.extend(dst.to_be_bytes());
    bytes.extend(seq.to_be_bytes());
    bytes.extend(ack.to_be_bytes());
    bytes.extend([0x50, flags, 0, 0, 0, 0, 0, 0]);
    bytes.extend(payload);
    bytes
}

/// `stream.direction:text`, `stream.direction-missing`, and `stream.direction.` for the end, in order.
fn tell(way: &Way, chunk: Chunk<'_>) -> String {
    let name = format!("{}.{}", way.stream, way.direction);
    match chunk {
        Chunk::Data(bytes) => format!("{name}:{}", String::from_utf8_lossy(bytes)),
        Chunk::Gap(length) => format!("{name}-{length}"),
        Chunk::End(ending) => format!("{name}.{ending:?}"),
    }
}

/// Sender, flags, sequence number, payload.
type Row = (u8, u8, u32, &'static str);

fn story(limits: Limits, rows: &[Row]) -> (Vec<String>, Counters) {
    let mut streams = Streams::new(limits);
    let mut told = Vec::new();
    for (from, flags, seq, payload) in rows {
        let bytes = segment(*from, *flags, *seq, 1, payload.as_bytes());
        let packet = wire::parse(LinkType::RAW, &bytes, 0).expect("well-formed");
        streams.handle_packet(&packet, &mut |way, chunk| told.push(tell(way, chunk)));
    }
    streams.handle_end(&mut |way, chunk| told.push(tell(way, chunk)));
    (told, streams.counters())
}

#[test]
fn stories() {
    let rows: &[(&str, &[Row], &[&str])] = &[
        (
            "a connection",
            &[
                (0, SYN, 99, ""),
                (1, SYN | ACK, 499, ""),
                (0, ACK, 100, "ab"),
                (1, ACK, 500, "xy"),
                (0, ACK | FIN, 102, "c"),
                (1, ACK | FIN, 502, ""),
            ],
            &["0.0:ab", "0.1:xy", "0.0:c", "0.0.Fin", "0.1.Fin"],
        ),
        (
            "retransmitted",
            &[(0, SYN, 99, ""), (0, ACK, 100, "ab"), (0, ACK, 100, "ab"), (0, ACK, 101, "bcd")],
            &["0.0:ab", "0.0:cd", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "reordered",
            &[(0, SYN, 99, ""), (0, ACK, 102, "cd"), (0, ACK, 104, "ef"), (0, ACK, 100, "ab")],
            &["0.0:ab", "0.0:cd", "0.0:ef", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "the first data wins",
            &[(0, SYN, 99, ""), (0, ACK, 102, "cd"), (0, ACK, 100, "abXXef")],
            &["0.0:ab", "0.0:cd", "0.0:ef", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "overlap before and behind",
            &[(0, SYN, 99, ""), (0, ACK, 103, "d"), (0, ACK, 101, "bcXeY"), (0, ACK, 100, "a")],
            &["0.0:a", "0.0:bc", "0.0:d", "0.0:eY", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "a hole",
            &[(0, SYN, 99, ""), (0, ACK, 100, "ab"), (0, ACK, 105, "f")],
            &["0.0:ab", "0.0-3", "0.0:f", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "a hole before the end",
            &[(0, SYN, 99, ""), (0, ACK, 100, "ab"), (0, ACK | FIN, 105, "")],
            &["0.0:ab", "0.0-3", "0.0.Fin", "0.1.Capture"],
        ),
        (
            "a capture that starts in the middle of a connection",
            &[(0, ACK | PSH, 7000, "ab"), (0, ACK, 6998, "zzab"), (0, ACK, 7002, "c")],
            &["0.0:ab", "0.0:c", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "keep-alive",
            &[(0, ACK, 7000, ""), (0, ACK, 6999, "\0"), (0, ACK, 7000, "a"), (0, ACK, 7000, "\0")],
            &["0.0:a", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "keep-alive as the first segment of the capture",
            &[(0, ACK, 6999, ""), (0, ACK, 6999, ""), (0, ACK, 7000, "ab"), (0, ACK, 7001, "bc")],
            &["0.0:ab", "0.0:c", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "an acknowledgement, then reordered segments",
            &[(0, ACK, 7000, ""), (0, ACK, 7002, "cd"), (0, ACK, 7000, "ab"), (0, ACK, 7001, "bc")],
            &["0.0:ab", "0.0:cd", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "a capture that starts with data",
            &[(0, ACK, 7000, "a"), (0, ACK, 7002, "c"), (0, ACK, 7001, "b")],
            &["0.0:a", "0.0:b", "0.0:c", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "simultaneous open",
            &[
                (0, SYN, 99, ""),
                (1, SYN, 499, ""),
                (0, SYN | ACK, 99, ""),
                (1, SYN | ACK, 499, ""),
                (0, ACK, 100, "ab"),
                (1, ACK, 500, "xy"),
            ],
            &["0.0:ab", "0.1:xy", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "zero-window probes",
            &[
                (0, SYN, 99, ""),
                (0, ACK, 100, "ab"),
                (0, ACK, 102, "c"),
                (0, ACK, 102, "c"),
                (0, ACK, 102, "cd"),
            ],
            &["0.0:ab", "0.0:c", "0.0:d", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "FIN before the data",
            &[(0, SYN, 99, ""), (0, ACK | FIN, 102, "c"), (0, ACK, 100, "ab")],
            &["0.0:ab", "0.0:c", "0.0.Fin", "0.1.Capture"],
        ),
        (
            "sequence numbers wrap",
            &[(0, SYN, u32::MAX - 1, ""), (0, ACK, u32::MAX, "ab"), (0, ACK, 1, "cd"), (0, ACK, 3, "e")],
            &["0.0:ab", "0.0:cd", "0.0:e", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "reset",
            &[(0, SYN, 99, ""), (0, ACK, 100, "ab"), (1, RST, 0, "no such user")],
            &["0.0:ab", "0.0.Reset", "0.1.Reset"],
        ),
        (
            "data after the FIN",
            &[(0, SYN, 99, ""), (0, ACK | FIN, 100, "a"), (0, ACK, 101, "bc"), (0, ACK, 100, "a")],
            &["0.0:a", "0.0.Fin", "0.1.Capture"],
        ),
        (
            "data on the SYN",
            &[(0, SYN, 99, "ab"), (0, ACK, 102, "c")],
            &["0.0:ab", "0.0:c", "0.0.Capture", "0.1.Capture"],
        ),
        (
            "a new connection with the same ports",
            &[
                (0, SYN, 99, ""),
                (0, ACK, 100, "a"),
                (0, SYN, 99, ""),
                (0, SYN, 5000, ""),
                (0, ACK, 5001, "b"),
            ],
            &["0.0:a", "0.0.Reused", "0.1.Reused", "1.0:b", "1.0.Capture", "1.1.Capture"],
        ),
    ];
    for (name, rows, expected) in rows {
        let (told, counters) = story(Limits::default(), rows);
        assert_eq!(told, *expected, "{name}");
        assert_eq!(
            counters.captured,
            counters.delivered + counters.repeated + counters.stray,
            "{name}: {counters:?}"
        );
    }
}

#[test]
fn conflicting_retransmissions_are_counted() {
    let (_, counters) =
        story(Limits::default(), &[(0, SYN, 99, ""), (0, ACK, 102, "cd"), (0, ACK, 100, "abXdef")]);
    assert_eq!((counters.repeated, counters.conflicting, counters.delivered), (2, 1, 6));
}

#[test]
fn waiting_bytes_are_bounded() {
    let rows = [(0, SYN, 99, ""), (0, ACK, 102, "cdef"), (0, ACK, 110, "klmn"), (0, ACK, 120, "u")];
    for limits in
        [Limits { waiting: 6, ..Limits::default() }, Limits { waiting_total: 6, ..Limits::default() }]
    {
        let (told, counters) = story(limits, &rows);
        assert_eq!(told[..4], ["0.0-2", "0.0:cdef", "0.0-4", "0.0:klmn"]);
        assert_eq!(counters.overfull, 1);
    }
}

#[test]
fn streams_are_bounded() {
    let mut streams = Streams::new(Limits { streams: 4, ..Limits::default() });
    let mut forgotten = 0;
    for port in 0..20u16 {
        let mut bytes = segment(0, ACK, 100, 1, b"a");
        bytes[20..22].copy_from_slice(&(1000 + port).to_be_bytes());
        let packet = wire::parse(LinkType::RAW, &bytes, 0).expect("well-formed");
        streams.handle_packet(&packet, &mut |_, chunk| {
            forgotten += u64::from(chunk == Chunk::End(Ending::Forgotten))
        });
    }
    assert!(streams.streams.len() <= 4);
    assert_eq!(streams.counters().streams, 20);
    assert_eq!((streams.counters().forgotten, forgotten), (16, 32));
}

#[test]
fn truncated_bytes_are_a_gap() {
    let bytes = segment(0, ACK, 100, 1, b"abcdef");
    let next = segment(0, ACK, 106, 1, b"gh");
    let mut streams = Streams::new(Limits::default());
    let mut told = Vec::new();
    let cut = wire::parse(LinkType::RAW, &bytes[..42], bytes.len() as u32).expect("well-formed");
    streams.handle_packet(&cut, &mut |way, chunk| told.push(tell(way, chunk)));
    streams.handle_packet(&wire::parse(LinkType::RAW, &next, 0).expect("well-formed"), &mut |way, chunk| {
        told.push(tell(way, chunk));
    });
    streams.handle_end(&mut |way, chunk| told.push(tell(way, chunk)));
    assert_eq!(told[..3], ["0.0:ab", "0.0-4", "0.0:gh"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Segments of one stream in any order, overlapping and repeated, give the stream, with gaps for the bytes that no
    /// segment has.
    #[test]
    fn any_order_of_segments_gives_the_stream(
        isn in any::<u32>(),
        length in 1usize..600,
        pieces in prop::collection::vec((any::<prop::sample::Index>(), 1usize..80), 0..60),
        all in any::<bool>(),
    ) {
        let sent: Vec<u8> = (0..length).map(|at| (at * 7 + at / 251) as u8).collect();
        let mut pieces: Vec<(usize, usize)> =
            pieces.iter().map(|(at, size)| (at.index(length), *size)).map(|(at, size)| (at, (at + size).min(length))).collect();
        if all {
            pieces.extend((0..length).step_by(50).map(|at| (at, (at + 50).min(length))));
        }
        let mut covered = vec![false; length];
        let mut streams = Streams::new(Limits::default());
        let mut received: Vec<Option<u8>> = Vec::new();
        let mut out = |way: &Way, chunk: Chunk<'_>| {
            if way.direction == 0 {
                match chunk {
                    Chunk::Data(bytes) => received.extend(bytes.iter().map(|byte| Some(*byte))),
                    Chunk::Gap(missing) => received.extend(std::iter::repeat_n(None, missing as usize)),
                    Chunk::End(_) => {}
                }
            }
        };
        let syn = segment(0, SYN, isn, 0, b"");
        streams.handle_packet(&wire::parse(LinkType::RAW, &syn, 0).expect("well-formed"), &mut out);
        for (start, end) in &pieces {
            covered[*start..*end].fill(true);
            let seq = isn.wrapping_add(1 + *start as u32);
            let bytes = segment(0, ACK, seq, 1, &sent[*start..*end]);
            streams.handle_packet(&wire::parse(LinkType::RAW, &bytes, 0).expect("well-formed"), &mut out);
        }
        streams.handle_end(&mut out);
        let last = covered.iter().rposition(|covered| *covered).map_or(0, |last| last + 1);
        let expected: Vec<Option<u8>> = (0..last).map(|at| covered[at].then_some(sent[at])).collect();
        prop_assert_eq!(received, expected);
        let counters = streams.counters();
        prop_assert_eq!(counters.captured, counters.delivered + counters.repeated + counters.stray);
        prop_assert_eq!(counters.conflicting, 0);
    }
}
