use super::*;

/// A segment: direction, flags, sequence number, acknowledgement number, payload length, window; and the result.
type Row = (char, &'static str, u32, u32, u32, u16, Fit);
use Fit::{Fits, Ignored, Invalid};

fn play(title: &str, isns: [u32; 2], scale: Option<u8>, rows: &[Row]) {
    play_from(Window::default(), title, isns, scale, rows);
}

fn play_from(mut window: Window, title: &str, isns: [u32; 2], scale: Option<u8>, rows: &[Row]) {
    for (i, &(direction, letters, seq, ack, tcp_len, tcp_window, fit)) in rows.iter().enumerate() {
        let letter = |letter| match letter {
            'F' => FIN,
            'S' => SYN,
            'R' => RST,
            'A' => ACK,
            _ => panic!("no flag {letter}"),
        };
        let tcp_flags = letters.chars().map(letter).sum();
        let side = usize::from(direction == '<');
        let segment = Segment {
            tcp_flags,
            tcp_seq: seq.wrapping_add(isns[side]),
            tcp_ack: if tcp_flags & ACK != 0 { ack.wrapping_add(isns[1 - side]) } else { 0 },
            tcp_len,
            tcp_window,
            tcp_wscale: scale.filter(|_| tcp_flags & SYN != 0),
            ..Segment::default()
        };
        let direction = if side == 0 { Direction::Forward } else { Direction::Reverse };
        let before = window;
        assert_eq!(window.segment(direction, &segment), fit, "{title}: segment {i}, isns {isns:x?}");
        assert_eq!(Window::from_words(window.words()), window, "{title}: segment {i} packed");
        if fit != Fits {
            assert_eq!(window, before, "{title}: segment {i} changed something");
        }
    }
}

const OPEN: [Row; 3] =
    [('>', "S", 0, 0, 0, 1000, Fits), ('<', "SA", 0, 1, 0, 2000, Fits), ('>', "A", 1, 1, 0, 1000, Fits)];

#[test]
fn stories() {
    // Sequence numbers relative to the initial ones; both sides continue at 1 after the handshake.
    let stories: &[(&str, &[Row])] = &[
        (
            "data both ways",
            &[
                ('>', "A", 1, 1, 500, 1000, Fits),
                ('<', "A", 1, 501, 700, 2000, Fits),
                ('>', "A", 501, 701, 0, 1000, Fits),
            ],
        ),
        (
            "up to the window and not beyond",
            &[
                ('>', "A", 2001, 1, 100, 1000, Fits),
                ('>', "A", 2002, 1, 100, 1000, Invalid),
                ('<', "A", 1, 1001, 0, 2000, Fits),
                ('>', "A", 3001, 1, 1, 1000, Fits),
            ],
        ),
        (
            "a retransmission, and an old duplicate",
            &[
                ('>', "A", 1, 1, 2000, 1000, Fits),
                ('<', "A", 1, 2001, 0, 2000, Fits),
                ('>', "A", 2001, 1, 2000, 1000, Fits),
                ('>', "A", 1, 1, 2000, 1000, Fits),
                ('>', "A", 1, 1, 1999, 1000, Ignored),
            ],
        ),
        (
            "a window that closes does not forbid what it was open for",
            &[
                ('>', "A", 1, 1, 500, 1000, Fits),
                ('<', "A", 1, 501, 0, 10, Fits),
                ('>', "A", 1, 1, 100, 1000, Fits),
            ],
        ),
        (
            "no acknowledgement of what was not sent",
            &[
                ('>', "A", 1, 1, 500, 1000, Fits),
                ('<', "A", 1, 502, 0, 2000, Invalid),
                ('<', "A", 1, 501, 0, 2000, Fits),
            ],
        ),
        ("nor of what is long past", &[('<', "A", 1, 1_u32.wrapping_sub(70_000), 0, 2000, Ignored)]),
        ("a segment without ACK", &[('>', "", 1, 0, 10, 1000, Invalid), ('>', "F", 1, 0, 0, 1000, Invalid)]),
        (
            "a closed window takes a probe of one byte",
            &[
                ('>', "A", 1, 1, 500, 1000, Fits),
                ('<', "A", 1, 501, 0, 0, Fits),
                ('>', "A", 501, 1, 1, 1000, Fits),
                ('>', "A", 2500, 1, 1, 1000, Invalid),
            ],
        ),
        ("a keepalive", &[('>', "A", 1, 1, 10, 1000, Fits), ('>', "A", 10, 1, 0, 1000, Fits)]),
        (
            "a FIN takes a number",
            &[
                ('>', "FA", 1, 1, 0, 1000, Fits),
                ('<', "A", 1, 2, 0, 2000, Fits),
                ('<', "A", 1, 3, 0, 2000, Invalid),
                ('<', "FA", 1, 2, 0, 2000, Fits),
                ('>', "A", 2, 2, 0, 1000, Fits),
            ],
        ),
        (
            "a reset must be exact",
            &[
                ('>', "A", 1, 1, 500, 1000, Fits),
                ('>', "R", 5000, 0, 0, 0, Invalid),
                ('>', "R", 502, 0, 0, 0, Ignored),
                ('>', "R", 0, 0, 0, 0, Invalid),
                ('>', "R", 501, 0, 0, 0, Fits),
                ('>', "R", 1, 0, 0, 0, Fits),
            ],
        ),
        (
            "a SYN in the middle is for its receiver to answer",
            &[
                ('>', "S", 77_777, 0, 0, 1000, Ignored),
                ('<', "SA", 0, 1, 0, 2000, Ignored),
                ('>', "A", 1, 1, 500, 1000, Fits),
            ],
        ),
    ];
    for (title, rows) in stories {
        let rows: Vec<_> = OPEN.iter().chain(*rows).copied().collect();
        for isns in
            [[0, 0], [1000, 2_000_000_000], [u32::MAX, u32::MAX - 600], [u32::MAX - 1999, 0x7fff_ff00]]
        {
            play(title, isns, None, &rows);
        }
    }
}

#[test]
fn opening() {
    let stories: &[(&str, &[Row])] = &[
        (
            "a repeated SYN",
            &[OPEN[0], OPEN[0], OPEN[1], OPEN[0].ignored(), OPEN[1], OPEN[2], OPEN[1].ignored()],
        ),
        (
            "another answer",
            &[
                OPEN[0],
                OPEN[1],
                ('<', "SA", 77_777, 1, 0, 2000, Fits),
                ('>', "A", 1, 1, 0, 1000, Ignored),
                ('>', "A", 1, 77_778, 0, 1000, Fits),
                ('<', "SA", 99_999, 1, 0, 2000, Ignored),
            ],
        ),
        (
            "another attempt",
            &[OPEN[0], ('>', "S", 500, 0, 0, 1000, Fits), ('<', "SA", 0, 501, 0, 2000, Fits)],
        ),
        ("data before the answer", &[OPEN[0], ('>', "A", 1, 1, 10, 1000, Invalid)]),
        (
            "an answer to something else",
            &[
                OPEN[0],
                ('<', "SA", 0, 0, 0, 2000, Invalid),
                ('<', "SA", 0, 2, 0, 2000, Invalid),
                ('<', "FA", 0, 1, 0, 2000, Invalid),
                ('<', "", 0, 0, 10, 2000, Invalid),
            ],
        ),
        (
            // As in Linux's conntrack_syn_challenge_ack.pkt.
            "an older connection of the other side",
            &[
                OPEN[0],
                ('<', "A", 145_824_453, 643_160_523, 0, 240, Ignored),
                ('>', "R", 643_160_523, 0, 0, 0, Ignored),
                OPEN[0],
                OPEN[1],
                OPEN[2],
                ('<', "A", 1, 1, 700, 2000, Fits),
            ],
        ),
        (
            "refused",
            &[
                OPEN[0],
                ('<', "RA", 0, 2, 0, 0, Invalid),
                ('<', "R", 0, 0, 0, 0, Invalid),
                ('<', "RA", 0, 1, 0, 0, Fits),
            ],
        ),
        ("given up", &[OPEN[0], ('>', "R", 2, 0, 0, 0, Ignored), ('>', "R", 1, 0, 0, 0, Fits)]),
        (
            "at the same time",
            &[
                OPEN[0],
                ('<', "S", 0, 0, 0, 2000, Fits),
                ('>', "A", 1, 1, 10, 1000, Fits),
                ('<', "A", 1, 11, 0, 2000, Fits),
            ],
        ),
        (
            "data in the SYN, of which none was taken",
            &[
                ('>', "S", 0, 0, 100, 1000, Fits),
                ('<', "SA", 0, 1, 0, 2000, Fits),
                ('>', "A", 1, 1, 100, 1000, Fits),
            ],
        ),
    ];
    for (title, rows) in stories {
        for isns in [[0, 0], [u32::MAX, 0x8000_0000]] {
            play(title, isns, None, rows);
        }
    }
}

trait Changed {
    fn ignored(self) -> Self;
}

impl Changed for Row {
    fn ignored(mut self) -> Self {
        self.6 = Ignored;
        self
    }
}

#[test]
fn windows_scale_if_both_sides_do() {
    let wide: &[Row] = &[OPEN[0], OPEN[1], OPEN[2], ('<', "A", 1, 1, 0, 2000, Fits)];
    let far: Row = ('>', "A", 1 + 2000 * 128, 1, 0, 1000, Fits);
    let (mut beyond, mut unscaled) = (far, far);
    (beyond.2, beyond.6) = (far.2 + 1, Invalid);
    unscaled.6 = Invalid;
    play("scaled", [0, 0], Some(7), &[wide, &[beyond, far]].concat());
    play("not scaled", [0, 0], None, &[wide, &[unscaled]].concat());
    // The window of a SYN is never scaled.
    play("in the SYN", [0, 0], Some(7), &[&OPEN[..], &[unscaled]].concat());
}

#[test]
fn a_resumed_connection_is_learned_from_its_segments() {
    let stories: &[(&str, &[Row])] = &[
        (
            "in the middle",
            &[
                ('>', "A", 5000, 9000, 500, 1000, Fits),
                ('>', "R", 5500, 0, 0, 0, Ignored),
                ('<', "A", 9000, 5500, 700, 2000, Fits),
                // From here on segments are checked.
                ('>', "A", 7501, 9700, 1, 1000, Invalid),
                ('>', "A", 7500, 9700, 1, 1000, Fits),
                ('<', "A", 9700, 70_000_000, 0, 2000, Invalid),
                ('>', "R", 6000, 0, 0, 0, Ignored),
                ('>', "R", 70_000_000, 0, 0, 0, Invalid),
                ('>', "R", 5500, 0, 0, 0, Fits),
            ],
        ),
        (
            "the first one is a retransmission, and more has passed the other gate",
            &[
                ('>', "A", 5000, 9000, 500, 1000, Fits),
                ('<', "A", 9000, 5000, 0, 2000, Fits),
                ('<', "A", 9000, 6800, 0, 2000, Fits),
                ('>', "A", 6800, 9000, 500, 1000, Fits),
                ('<', "A", 9000, 8801, 0, 2000, Invalid),
            ],
        ),
        (
            "a forged segment is forgotten",
            &[
                ('>', "A", 1_000_000_000, 2_000_000_000, 500, 1000, Fits),
                ('<', "A", 9000, 5000, 0, 2000, Fits),
                ('>', "A", 5000, 9000, 500, 1000, Fits),
                ('>', "A", 1_000_000_000, 2_000_000_000, 500, 1000, Invalid),
            ],
        ),
        (
            "in the handshake",
            &[
                ('<', "SA", 0, 1, 0, 2000, Fits),
                ('>', "A", 1, 1, 500, 1000, Fits),
                ('<', "A", 1, 501, 100, 2000, Fits),
                ('>', "", 501, 0, 10, 1000, Invalid),
            ],
        ),
        (
            "a SYN that is repeated",
            &[
                ('>', "S", 0, 0, 0, 1000, Fits),
                ('<', "SA", 0, 1, 0, 2000, Fits),
                ('>', "A", 1, 1, 0, 1000, Fits),
                ('>', "A", 2002, 1, 1, 1000, Invalid),
            ],
        ),
    ];
    // Without scales: the other gate has seen the SYNs.
    let mut before = Window::default();
    for row in &OPEN {
        let tcp_flags = if row.1.contains('S') { SYN } else { 0 } | if row.1.contains('A') { ACK } else { 0 };
        let direction = if row.0 == '>' { Direction::Forward } else { Direction::Reverse };
        let segment =
            Segment { tcp_flags, tcp_seq: row.2, tcp_ack: row.3, tcp_window: row.5, ..Segment::default() };
        assert_eq!(before.segment(direction, &segment), Fits);
    }
    for (title, rows) in stories {
        for isns in [[0, 0], [u32::MAX - 6000, 0x8000_0000 - 9100]] {
            play_from(before.resumed([before]), title, isns, None, rows);
        }
    }
    // Of a side whose SYN was not seen, the window may be of any scale.
    let far: &[Row] = &[
        ('>', "A", 5000, 9000, 500, 1000, Fits),
        ('<', "A", 9000, 5500, 0, 2000, Fits),
        ('>', "A", 5500 + (2000 << 14), 9000, 0, 1000, Fits),
        ('>', "A", 5501 + (2000 << 14), 9000, 0, 1000, Invalid),
    ];
    play_from(Window::default().resumed([]), "unknown", [0, 0], None, far);
    assert_eq!(Window::default().resumed([]).resumed([before]), before.resumed([before]).numberless());
}

impl Window {
    fn numberless(self) -> Self {
        Self(self.0.map(|side| Peer {
            scale: side.scale,
            scales: side.scales,
            resumed: side.resumed,
            ..Peer::default()
        }))
    }
}

#[test]
fn a_segment_in_fragments_may_end_anywhere_in_the_window() {
    let mut window = Window::default();
    let mut step = |direction, tcp_flags, tcp_seq, tcp_ack, tcp_len, tcp_fragment| {
        let segment = Segment {
            tcp_flags,
            tcp_seq,
            tcp_ack,
            tcp_len,
            tcp_fragment,
            tcp_window: 3000,
            ..Segment::default()
        };
        window.segment(direction, &segment)
    };
    let (there, back) = (Direction::Forward, Direction::Reverse);
    assert_eq!(step(there, SYN, 0, 0, 0, false), Fits);
    assert_eq!(step(back, SYN | ACK, 0, 1, 0, false), Fits);
    assert_eq!(step(there, ACK, 1, 1, 0, false), Fits);
    // 2000 bytes, of which 1448 are in the first fragment, and the rest of the window.
    assert_eq!(step(there, ACK, 1, 1, 1448, true), Fits);
    assert_eq!(step(back, ACK, 1, 2001, 0, false), Fits);
    assert_eq!(step(back, ACK, 1, 3002, 0, false), Invalid);
    assert_eq!(step(there, ACK, 2001, 1, 10, false), Fits);
    assert_eq!(step(there, ACK, 5002, 1, 1448, true), Invalid);
    assert_eq!(step(there, RST, 2001, 0, 0, false), Fits);
}

#[test]
fn sequence_numbers_in_flight() {
    let mut window = Window::default();
    let syn = Segment { tcp_flags: SYN, tcp_seq: 1000, tcp_window: 1000, ..Segment::default() };
    window.segment(Direction::Forward, &syn);
    for (seq, sent) in [(1000, true), (1001, false), (999, true), (1000_u32.wrapping_sub(70_000), false)] {
        assert_eq!(window.sent(Direction::Forward, seq), sent, "{seq}");
    }
    assert!(!window.sent(Direction::Reverse, 0));
}
