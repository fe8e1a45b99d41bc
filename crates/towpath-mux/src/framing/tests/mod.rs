//! Rows: framing, bytes, result.

use super::*;

/// Lengths of the messages of a stream, and the step that follows them.
fn lengths(framing: &Framing, stream: &[u8]) -> (Vec<usize>, Option<Step>) {
    let mut state = State::default();
    let (mut lengths, mut at) = (Vec::new(), 0);
    while at < stream.len() {
        match framing.step(&stream[at..], &mut state) {
            Step::Message(message) if at + message.length <= stream.len() => {
                lengths.push(message.length);
                at += message.length;
            }
            step => return (lengths, Some(step)),
        }
    }
    (lengths, None)
}

fn hex(text: &str) -> Vec<u8> {
    let digits: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn declared_lengths() {
    // Framing, stream in hex, lengths.
    let rows: &[(&str, &str, &[usize])] = &[
        ("length=1 adjust=1", "02 0102 00 01ff", &[3, 1, 2]),
        ("length=2 be adjust=2", "0003 aabbcc 0000", &[5, 2]),
        ("length=2 le", "0300 aa 0200", &[3, 2]),
        ("endian=little length=3", "040000 aa", &[4]),
        ("offset=1 length=4 be adjust=1", "51 00000005 aa", &[6]),
        ("length=8 adjust=8", "0000000000000001 aa", &[9]),
        ("length=5 le adjust=5", "0100000000 aa", &[6]),
        ("length=2 mask=0x0fff adjust=2", "f001 aa", &[3]),
        ("length=2 mask=0xfff0 shift=4 adjust=2", "0021 aabb", &[4]),
        ("length=1 scale=4 adjust=4", "01aabbcc 00112233", &[8]),
        ("offset=1 varint", "10 00 10 01 ff", &[2, 3]),
        ("varint=4 adjust=1", "01 aabb 00 cc", &[3, 2]),
        ("offset=1 ber", "30 01 aa 30 8101 bb 30 82 0002 cccc", &[3, 4, 6]),
        (r#"digits=":" adjust=1 tail=",""#, "31323a 68656c6c6f20776f726c6421 2c 303a2c", &[16, 3]),
        (r#"delimiter="\r\n""#, "61 0d0a 0d0a 62 0d 0d0a", &[3, 2, 4]),
        (r#"delimiter="\n" delimiter=";""#, "61 0a 62 3b 3b", &[2, 2, 1]),
        ("delimiter=0x00", "6100 00", &[2, 1]),
        ("fixed=3", "aabbcc ddeeff", &[3, 3]),
        ("length=4 mask=0x7fffffff last=0x80000000 adjust=4", "00000001 aa 80000002 bbcc 80000000", &[11, 4]),
        ("length=1 more=0x80 mask=0x7f adjust=1", "82 aabb 01 cc 00", &[5, 1]),
        ("length=1 adjust=1 chain=3", "03aabbcc 01dd 03aabbcc 00", &[6, 5]),
        (
            "when 01 (length=1 offset=1) when 02-03 (fixed=1) else (fixed=2)",
            "01 03 aa 02 03 ff00 02",
            &[3, 1, 1, 2, 1],
        ),
        ("when 80/c0 (fixed=2) when .. 05 (fixed=3) else (fixed=1)", "bf00 0005aa 07", &[2, 3]),
        (r#"when "ab" (fixed=3) else (fixed=1)"#, "616263 61 63", &[3, 1, 1]),
        ("start (fixed=4) length=1 adjust=1", "00010203 01aa 00", &[4, 2, 1]),
        ("start (when 41 (fixed=2) else (length=1)) length=1", "4100 01 02aa", &[2, 1, 2]),
        // Netty: bytes after the field, and the documentation's example of a negative adjustment.
        ("lengthFieldOffset=0 lengthFieldLength=2", "0001 aa", &[3]),
        ("lengthFieldLength=2 lengthAdjustment=-2 byteOrder=LITTLE_ENDIAN", "0300 aa", &[3]),
        (
            "lengthFieldOffset=1 lengthFieldLength=2 lengthAdjustment=1 initialBytesToStrip=3",
            "ca 0001 fe aa",
            &[5],
        ),
        // Other examples of its documentation.
        ("initialBytesToStrip=2 lengthFieldLength=2", "000c 48454c4c4f2c20574f524c44", &[14]),
        ("lengthAdjustment=0 lengthFieldLength=3 lengthFieldOffset=2", "cafe 000003 aabbcc", &[8]),
        ("lengthAdjustment=2 lengthFieldLength=3", "000003 cafe aabbcc", &[8]),
        (
            "failFast=false initialBytesToStrip=3 lengthAdjustment=-3 lengthFieldLength=2 lengthFieldOffset=1",
            "ca 0006 fe aabb",
            &[6],
        ),
        ("lengthFieldLength=8 maxFrameLength=9 failFast=true", "0000000000000001 aa", &[9]),
        // tokio-util: with num_skip=0 the value counts from the start of the frame.
        ("length_field_length=2", "0001 aa", &[3]),
        ("length_field_length=2 num_skip=0 length_adjustment=2 big_endian", "0001 aa", &[3]),
        ("length_field_length=2 num_skip=0", "0003 aa", &[3]),
        ("little_endian", "01000000 aa", &[5]),
        ("length_field_type=u16 length_adjustment=-2", "0003 aa", &[3]),
        (
            "length_adjustment=-2 num_skip=4 length_field_offset=1 length_field_length=2",
            "ca 0005 fe aabbcc",
            &[7],
        ),
        ("num_skip=9 length_field_length=1", "02 0000000000000000 aabb", &[11]),
        ("native_endian length_field_type=u8", "01 aa", &[2]),
    ];
    for (text, stream, expected) in rows {
        let framing = Framing::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let (lengths, rest) = lengths(&framing, &hex(stream));
        assert_eq!(lengths, *expected, "{text}: {stream} then {rest:?}");
    }
}

#[test]
fn needs_and_errors() {
    let too_big = |length, max| Step::Error(Cause::TooBig { length, max });
    let bad = |length, least| Step::Error(Cause::BadLength { length, least });
    let malformed = |reason| Step::Error(Cause::malformed(reason));
    let rows: &[(&str, &str, Step)] = &[
        ("offset=2 length=4", "00", Step::Need(6)),
        ("offset=2 length=4", "0000 000000", Step::Need(6)),
        ("offset=1 varint", "00", Step::Need(2)),
        ("offset=1 varint", "0080", Step::Need(3)),
        ("offset=1 ber", "3082", Step::Need(4)),
        (r#"delimiter="\r\n""#, "6161", Step::Need(3)),
        ("fixed=3 tail=0xff", "0000", Step::Need(3)),
        ("when 01 02 (fixed=2) else (fixed=1)", "01", Step::Need(2)),
        ("length=2 adjust=2 key=4:4", "0008", Step::Need(8)),
        ("length=2 max=16", "0011", too_big(Some(17), 16)),
        ("length=8 adjust=8", "ffffffffffffffff", too_big(Some(u64::MAX), 16 << 20)),
        ("length=8 scale=1024 adjust=8", "ffffffffffffffff", too_big(Some(u64::MAX), 16 << 20)),
        (r#"delimiter="\n" max=4"#, "61616161", too_big(None, 4)),
        ("length_field_length=1 max_frame_length=3", "04", too_big(Some(4), 3)),
        ("length=2", "0001", bad(1, 2)),
        ("length=2 adjust=-4", "0001", bad(-3, 2)),
        ("offset=2 length=1", "0000 02", bad(2, 3)),
        ("length=1 min=4", "03", bad(3, 4)),
        ("length=1 adjust=1 strip=3", "01", bad(2, 3)),
        ("varint=2", "8080", malformed("a variable-length number that does not end")),
        ("ber", "80", malformed("a BER length in the indefinite form")),
        (r#"digits=":""#, "3a", malformed("a length that is not decimal digits")),
        ("fixed=2 tail=0xff", "0000", malformed("the message does not end with its end mark")),
        ("when 01 (fixed=1)", "02", malformed("the first bytes match no case of this framing")),
        (r#"when 01 (refuse="version 1 is gone") else (fixed=1)"#, "01", malformed("version 1 is gone")),
        ("when 16 (giveback) else (fixed=1)", "16", Step::GiveBack),
    ];
    for (text, stream, expected) in rows {
        let framing = Framing::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(framing.step(&hex(stream), &mut State::default()), *expected, "{text}: {stream}");
    }
}

#[test]
fn strip_mark_and_key() {
    let message =
        |text: &str, bytes: &[u8]| match Framing::parse(text).unwrap().step(bytes, &mut State::default()) {
            Step::Message(message) => message,
            step => panic!("{text}: {step:?}"),
        };
    assert_eq!(
        message("length=2 adjust=2 strip=2", &[0, 1, 7]),
        Message { length: 3, skip: 2, ..Message::default() }
    );
    assert_eq!(message("lengthFieldLength=1 initialBytesToStrip=1", &[1, 7]).skip, 1);
    assert_eq!(message("length_field_length=2 length_field_offset=1", &[9, 0, 1, 7]).skip, 3);
    let line = message("line", b"ab\r\n");
    assert_eq!((line.length, line.skip, line.trim), (4, 0, 2));
    assert_eq!(message("line", b"ab\n").trim, 1);
    let net = message("netstring", b"3:abc,");
    assert_eq!((net.length, net.skip, net.trim), (6, 2, 1));
    assert_eq!(message("when 01 (fixed=1 mark=7) else (fixed=1)", &[1]).mark, 7);
    // FNV-1a of "a" (RFC 9923, appendix C).
    assert_eq!(message("fixed=3 key=1:1", b"xay").hash, 0xe40c_292c);
    assert_eq!(message("fixed=3 key=1:1", b"zaz").hash, message("fixed=3 key=1:1", b"xay").hash);
}

#[test]
fn errors_name_the_column_and_the_fix() {
    let rows = [
        (
            "",
            "column 1: no key gives the end of a message: use length, varint, ber, digits, delimiter or fixed",
        ),
        ("offset=0 lenght=4", "column 10: unknown key \"lenght\"; did you mean \"length\"?"),
        ("length=9", "column 8: length must be 1 to 8 bytes wide, not 9"),
        ("length=four", "column 8: \"four\" is not a number: write 4, -4, 0x7fff, 64K, 16M or 1G"),
        ("length=", "column 8: missing value after \"=\""),
        ("length", "column 1: length needs a number: length=4"),
        ("length=4 length=4", "column 10: length is given twice"),
        ("length=4 varint", "column 10: length and varint both give the end of a message: use one"),
        ("length=4 be le", "column 13: the byte order is given twice"),
        ("fixed=4 adjust=1", "column 9: adjust needs a length field and cannot be used with fixed"),
        ("varint mask=1", "column 8: mask needs length and cannot be used with varint"),
        (
            "length=4 lengthAdjustment=2",
            "column 10: length and lengthAdjustment belong to different spellings (Towpath, Netty, tokio-util): use one",
        ),
        (
            "lengthFieldLength=4 num_skip=0",
            "column 21: lengthFieldLength and num_skip belong to different spellings (Towpath, Netty, tokio-util): use one",
        ),
        (
            "lengthfieldlength=4",
            "column 1: unknown key \"lengthfieldlength\"; did you mean \"lengthFieldLength\"?",
        ),
        (
            "when 16 length=4",
            "column 6: when needs a pattern and clauses in brackets: when 16 03 (length=2 offset=3)",
        ),
        (
            "when 1g (fixed=1)",
            "column 6: \"1g\" is not a byte: write 16, 14-18, 80/80 (value/mask), .. (any), ff*16 or \"text\"",
        ),
        ("when 81/80 (fixed=1)", "column 6: \"81/80\" never matches: the value has bits outside the mask"),
        ("when 16 (fixed=1", "column 17: missing \")\""),
        (
            "when 16 (fixed=1) length=4",
            "column 19: length next to when and else: put it into the brackets of each case",
        ),
        ("else (fixed=1)", "column 1: else without when"),
        ("delimiter=\"\\q\"", "column 12: unknown escape; write \\r \\n \\t \\0 \\\\ \\\" \\xNN"),
        ("delimiter=\"", "column 11: missing closing \""),
        ("delimiter=0x0", "column 11: \"0x0\" is not a sequence of hex bytes such as 0x0d0a"),
        ("fixed=4 max=2", "column 9: fixed is outside min and max"),
        ("length=4 min=9 max=8", "column 10: min, 9, is above max, 8"),
        ("big_endian little_endian", "column 12: the byte order is given twice"),
        ("length_field_type=i16", "column 1: length_field_type must be u8, u16, u32 or u64"),
        ("lengthFieldLength=2 failFast=no", "column 21: failFast must be true or false"),
        ("kafak", "column 1: unknown preset \"kafak\"; did you mean \"kafka\"?"),
        ("length=4 =", "column 10: expected a key such as length=4, found '='"),
    ];
    for (text, expected) in rows {
        let error = Framing::parse(text).expect_err(text);
        assert_eq!(error.to_string(), expected, "{text}");
    }
}

#[test]
fn toml_is_equivalent_to_the_line_form() {
    let rows = [
        (
            "offset = 1\nlength = 4\nbe = true\nle = false\nadjust = 1\nmax = '1K'",
            "offset=1 length=4 be adjust=1 max=1K",
        ),
        (
            "lengthFieldOffset = 0\nlengthFieldLength = 2\nbyteOrder = 'LITTLE_ENDIAN'",
            "lengthFieldLength=2 byteOrder=LITTLE_ENDIAN",
        ),
        (
            "delimiter = [\"\\r\\n\", \"\\n\"]\nstrip = 'delimiter'\nmax = 0x10000",
            "delimiter=\"\\r\\n\" delimiter=\"\\n\" strip=delimiter max=64K",
        ),
        ("length = 1\nadjust = 1\n[start]\nfixed = 4\n", "start (fixed=4) length=1 adjust=1"),
        (
            "[[when]]\nfirst = \"16 03\"\ngiveback = true\n[[when]]\nfirst = \"'GET '\"\ndelimiter = \"\\r\\n\\r\\n\"\n[else]\nlength = 2\n",
            r#"when 16 03 (giveback) when "GET " (delimiter="\r\n\r\n") else (length=2)"#,
        ),
    ];
    for (document, text) in rows {
        let clauses = toml::clauses(document).unwrap_or_else(|error| panic!("{document}: {error}"));
        let from_toml = compile::declared(&clauses).unwrap_or_else(|fault| panic!("{document}: {fault:?}"));
        let from_text = compile::declared(&super::text::clauses(text).unwrap()).unwrap();
        assert_eq!(format!("{from_toml:?}"), format!("{from_text:?}"), "{document}");
    }
}

#[test]
fn toml_errors_have_line_and_column() {
    let rows = [
        ("offset = 0\nlenght = 4\n", "2:1: unknown key \"lenght\"; did you mean \"length\"?"),
        ("length = 2\n[[when]]\nfixed = 2\n", "2:3: when needs a pattern of first bytes: first = \"16 03\""),
        ("length = 2.5\n", "1:10: length must be a number, a string or a boolean"),
        ("length = \"2x\"\n", "1:11: \"2x\" is not a number: write 4, -4, 0x7fff, 64K, 16M or 1G"),
        ("length = 4\nmax = '16Q'\n", "2:8: \"16Q\" is not a number: write 4, -4, 0x7fff, 64K, 16M or 1G"),
        (
            "[[when]]\nfirst = '1'\nfixed = 2\n",
            "2:10: \"1\" is not a byte: write 16, 14-18, 80/80 (value/mask), .. (any), ff*16 or \"text\"",
        ),
    ];
    for (document, expected) in rows {
        assert_eq!(Framing::from_toml(document).expect_err(document).to_string(), expected);
    }
    let syntax = Framing::from_toml("length = \n").expect_err("no value");
    assert_eq!(syntax.line, Some(1));
}

#[test]
fn every_preset_is_found_by_name_and_alias() {
    for preset in PRESETS {
        Framing::preset(preset.name).unwrap_or_else(|error| panic!("{}: {error}", preset.name));
        if !preset.alias.is_empty() {
            assert_eq!(Framing::preset(preset.alias).unwrap().name(), preset.name);
        }
        assert!(is_name(preset.name), "{}", preset.name);
        assert!(!preset.about.is_empty());
    }
    let mut names: Vec<_> = PRESETS
        .iter()
        .flat_map(|preset| [preset.name, preset.alias])
        .filter(|name| !name.is_empty())
        .collect();
    names.sort_unstable();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count, "two presets of one name");
}

mod presets;
mod text;

/// docs/book/src/reference/framing.md matches the code.
#[test]
fn the_reference_page_matches_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/framing.md");
    let text = std::fs::read_to_string(path).expect("docs/book/src/reference/framing.md");
    let documents: Vec<&str> =
        text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap_or("")).collect();
    assert!(documents.len() >= 6);
    for document in documents {
        Framing::from_toml(document).unwrap_or_else(|error| panic!("{error} in\n{document}"));
    }
    for line in text.lines().filter_map(|line| line.split("--framing '").nth(1)) {
        Framing::parse(line.trim_end_matches('\'')).unwrap_or_else(|error| panic!("{error} in {line}"));
    }
    for preset in PRESETS {
        let alias = if preset.alias.is_empty() { String::new() } else { format!("`{}`", preset.alias) };
        let row = format!("| `{}` | {alias} | {} | `{}` |", preset.name, preset.about, preset.order.name());
        assert!(text.contains(&row), "docs/book/src/reference/framing.md lacks the row\n{row}");
    }
    for key in compile::all_keys() {
        assert!(
            text.contains(&format!("`{key}")) || text.contains(&format!("[{key}]")),
            "docs/book/src/reference/framing.md lacks {key}"
        );
    }
}

/// docs/book/src/reference/mux.md has the protocol ids of presets.
#[test]
fn the_table_of_alpn_matches_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/mux.md");
    let text = std::fs::read_to_string(path).expect("docs/book/src/reference/mux.md");
    let table = text.split("| preset | ALPN | STARTTLS |\n|---|---|---|\n").nth(1).expect("the table");
    let rows: Vec<_> = table.lines().take_while(|line| line.starts_with('|')).collect();
    let presets = PRESETS.iter().filter(|preset| !preset.alpn.is_empty() || preset.starttls.is_some());
    let expected = presets.map(|preset| {
        let ids: Vec<_> = preset.alpn.iter().map(|id| format!("`{id}`")).collect();
        let starttls = match preset.starttls {
            Some(StartTls::Smtp) => " STARTTLS |",
            Some(StartTls::Postgres) => " SSLRequest |",
            None => " |",
        };
        let ids = if ids.is_empty() { String::new() } else { format!(" {}", ids.join(", ")) };
        format!("| `{}` |{ids} |{starttls}", preset.name)
    });
    assert_eq!(rows, expected.collect::<Vec<_>>());
}

/// KCM's program on pipelined messages, in any segmentation.
#[test]
fn a_program_made_for_kcm() {
    use crate::Time;
    use crate::assembler::{Assembler, Event, Limits};

    let object = include_bytes!("../../../../towpath-bpf/tests/programs/thrift.o");
    let program =
        towpath_bpf::Program::load(object, &towpath_bpf::LoadOptions::default()).expect("a program");
    let framing = Framing::program("thrift.o", program);
    let stream: Vec<u8> = [14usize, 24, 34]
        .iter()
        .flat_map(|length| [&(*length as u32 - 4).to_be_bytes()[..], &vec![7; length - 4]].concat())
        .collect();
    for size in 1..=stream.len() {
        let mut assembler = Assembler::new(framing.clone(), Limits::default());
        let mut lengths = Vec::new();
        for piece in stream.chunks(size) {
            assembler.handle_bytes(piece);
            while let Some(Event::Message(message)) = assembler.poll(Time::default()) {
                lengths.push(message.bytes.len());
            }
        }
        assert_eq!(lengths, [14, 24, 34], "in pieces of {size}");
    }
}

#[test]
fn results_of_a_classic_program() {
    // One instruction each: `ret #k`.
    let ret = |k: i32| {
        let text = format!("1\n6 0 0 {}\n", k as u32);
        let program = towpath_bpf::Program::load(text.as_bytes(), &towpath_bpf::LoadOptions::default());
        Framing::program("ret", program.expect("a program")).step(b"abc", &mut State::default())
    };
    assert_eq!(ret(9), Step::from(9));
    assert_eq!(ret(0), Step::Need(4));
    assert_eq!(ret(-86), Step::GiveBack);
    assert_eq!(ret(-22), Step::Error(Cause::Program(22)));
    assert_eq!(Cause::Program(22).errno(), 22);
}
