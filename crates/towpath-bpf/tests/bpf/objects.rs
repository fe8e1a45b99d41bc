//! Objects made by clang: loaded, refused, and framing pipelined messages.
//!
//! The objects next to the sources were made by `clang -O2 -target bpf -nostdinc -c`. Each test runs with these objects, and once
//! more, in the module `compiled`, with objects that clang compiles from the sources.

use std::path::{Path, PathBuf};
use std::process::Command;

use towpath_bpf::{Code, Context, LoadOptions, Program};

fn programs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs")
}

fn read(name: &str) -> Vec<Vec<u8>> {
    vec![std::fs::read(programs().join(format!("{name}.o"))).expect("the object is in the project")]
}

/// The source compiled for each version of the instruction set.
fn compile(name: &str) -> Vec<Vec<u8>> {
    let clang = ["clang", "clang-19", "clang-14"].into_iter().find(|clang| {
        Command::new(clang).arg("--version").output().is_ok_and(|output| output.status.success())
    });
    let clang = clang.expect("clang");
    let object = |cpu| {
        let output = Command::new(clang)
            .args(["-O2", "-target", "bpf", "-nostdinc", cpu, "-o", "-", "-c"])
            .arg(programs().join(format!("{name}.c")))
            .output();
        let output = output.expect("clang runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    ["-mcpu=v1", "-mcpu=v2", "-mcpu=v3"].map(object).to_vec()
}

/// The objects of a source.
type Objects = fn(&str) -> Vec<Vec<u8>>;

macro_rules! with_both {
    ($($test:ident)*) => {
        mod stored {
            $(#[test] fn $test() { super::$test(super::read); })*
        }
        mod compiled {
            $(#[towpath_testenv::needs(clang)] #[test] fn $test() { super::$test(super::compile); })*
        }
    };
}

with_both! {
    the_documented_program_frames_pipelined_messages
    direct_access_asks_for_what_it_needs
    state_in_cb_lets_a_scan_go_on
    functions_of_the_text_section_are_linked
    objects_are_refused_with_the_reason
}

fn named(name: &str) -> LoadOptions {
    LoadOptions { name: Some(name.to_owned()), ..LoadOptions::default() }
}

fn load(object: &[u8], name: &str) -> Program {
    Program::load(object, &named(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The lengths of the messages in a stream that arrives byte by byte, each framed from its own offset 0.
fn frame(program: &Program, stream: &[u8]) -> Vec<usize> {
    let mut context = Context::new();
    let (mut start, mut lengths) = (0, Vec::new());
    for end in 1..=stream.len() {
        let message = &stream[start..end];
        let length = program.run(message, &mut context, &mut 10_000).expect("enough fuel");
        let length = usize::try_from(length).expect("no error");
        assert!(length == 0 || length >= message.len(), "{length} ends before {}", message.len());
        if length == message.len() {
            lengths.push(length);
            start = end;
        }
    }
    assert_eq!(start, stream.len(), "the stream ends with a message");
    lengths
}

fn the_documented_program_frames_pipelined_messages(objects: Objects) {
    // The reference frames these lengths wrong: it returns 14, 14, 14, ... for 14, 24 and 34 bytes.
    let lengths = [14_usize, 24, 34, 4, 300];
    let mut stream = Vec::new();
    for length in lengths {
        stream.extend(u32::try_from(length - 4).unwrap().to_be_bytes());
        stream.resize(stream.len() + length - 4, 0xee);
    }
    for object in objects("thrift") {
        let program = load(&object, "frame");
        assert_eq!(frame(&program, &stream), lengths);
        assert_eq!(program.run(&stream, &mut Context::new(), &mut 100), Ok(14), "all at once");
    }
}

fn direct_access_asks_for_what_it_needs(objects: Objects) {
    for object in objects("direct") {
        let program = load(&object, "length16");
        let mut context = Context::new();
        assert_eq!(program.run(&[1, 2, 0], &mut context, &mut 100), Ok(0));
        assert_eq!(context.mark, 4, "need at least 4");
        assert_eq!(program.run(&[1, 2, 0, 5], &mut context, &mut 100), Ok(5));
        assert_eq!(context.mark, 0, "the mark is of one run");
        assert_eq!(frame(&program, &[0, 0, 0, 4, 9, 9, 0, 6, 7, 7]), [4, 6]);
    }
}

fn state_in_cb_lets_a_scan_go_on(objects: Objects) {
    for object in objects("direct") {
        let program = load(&object, "lines");
        assert_eq!(frame(&program, b"PING\nSET a b\n\n"), [5, 8, 1]);
        let mut context = Context::new();
        let mut fuel = 10_000;
        let text = vec![b'x'; 500];
        assert_eq!(program.run(&text, &mut context, &mut fuel), Ok(0));
        assert_eq!(context.cb[0], 500);
        let first = 10_000 - fuel;
        fuel = 10_000;
        assert_eq!(program.run(&text, &mut context, &mut fuel), Ok(0));
        assert!((10_000 - fuel) * 10 < first, "nothing is scanned twice");
    }
}

fn functions_of_the_text_section_are_linked(objects: Objects) {
    for object in objects("direct") {
        let program = load(&object, "mqtt");
        assert_eq!(program.stats().functions, 2);
        let mut context = Context::new();
        assert_eq!(program.run(&[0x30, 0x80], &mut context, &mut 1000), Ok(0));
        assert_eq!(program.run(&[0x30, 0x80, 0x01], &mut context, &mut 1000), Ok(131));
        assert_eq!(context.hash, 128);
        assert_eq!(program.run(&[0x30, 0xff, 0xff, 0xff, 0xff, 0xff], &mut context, &mut 1000), Ok(-74));
        assert_eq!(frame(&program, &[0xc0, 0, 0x30, 3, 1, 2, 3, 0xd0, 0]), [2, 5, 2]);
    }
}

/// Objects that are refused: object, name, text of the error.
const REFUSED: &[(&str, Option<&str>, &str)] = &[
    (
        "direct",
        None,
        "3 programs, choose one by name: length16 (sk_skb/stream_parser), \
         lines (sk_skb/stream_parser/lines), mqtt (socket/mqtt)",
    ),
    (
        "direct",
        Some("varint"),
        "no program `varint`; there is length16 (sk_skb/stream_parser), \
         lines (sk_skb/stream_parser/lines), mqtt (socket/mqtt)",
    ),
    (
        "map",
        None,
        "function `count` uses the map `counters`; a framing program has none, its state is cb[0] to cb[4]",
    ),
    (
        "rodata",
        None,
        "function `look` uses `.rodata` in section .rodata; a framing program has no global data: \
         use constants in code, local variables, or cb[0] to cb[4]",
    ),
];

fn objects_are_refused_with_the_reason(objects: Objects) {
    for (file, name, message) in REFUSED {
        for object in objects(file) {
            let options = LoadOptions { name: name.map(str::to_owned), ..LoadOptions::default() };
            let error = Program::load(&object, &options).expect_err(file);
            assert_eq!(error.to_string(), *message);
        }
    }
}

#[test]
fn a_section_names_a_program_too() {
    let object = &read("direct")[0];
    assert_eq!(load(object, "socket/mqtt").stats().functions, 2);
}

#[test]
fn a_listing_has_functions_and_text() {
    let code = Code::load(&read("thrift")[0], &LoadOptions::default()).expect("an object");
    let text = "frame:\n    0: r6 = r1\n    1: r0 = *(u32 *)skb[0]\n    2: r0 += 4\n    3: exit\n";
    assert_eq!(code.to_string(), text);
}

#[test]
fn damaged_objects_are_errors() {
    let object = &read("direct")[0];
    for length in 0..object.len() {
        let _ = Program::load(&object[..length], &named("mqtt"));
    }
    for at in 0..object.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = object.clone();
            damaged[at] ^= flip;
            if let Ok(program) = Program::load(&damaged, &named("mqtt")) {
                let _ = program.run(&[0x30, 2, 1, 1], &mut Context::new(), &mut 1000);
            }
        }
    }
}
