//! Any text and any TOML either makes a framing or an error with a place in the text; the framing then takes any bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_mux::framing::{Framing, State, Step};

fuzz_target!(|input: &[u8]| {
    let (text, stream) = match input.iter().position(|byte| *byte == 0xff) {
        Some(at) => (&input[..at], &input[at + 1..]),
        None => (input, &input[..0]),
    };
    let Ok(text) = std::str::from_utf8(text) else { return };
    for framing in [Framing::parse(text), Framing::from_toml(text)] {
        match framing {
            Ok(framing) => walk(&framing, stream),
            Err(error) => {
                let lines: Vec<&str> = if error.line.is_some() { text.split('\n').collect() } else { vec![text] };
                let line = lines[error.line.map_or(0, |line| line as usize - 1).min(lines.len() - 1)];
                assert!(error.column as usize <= line.chars().count() + 1, "{error} in {text:?}");
            }
        }
    }
});

fn walk(framing: &Framing, stream: &[u8]) {
    let mut state = State::default();
    let mut at = 0;
    let mut given = 0;
    while at <= stream.len() && given < 1000 {
        given += 1;
        match framing.step(&stream[at..], &mut state) {
            Step::Message(message) => {
                assert!(message.length > 0 && message.skip + message.trim <= message.length);
                at += message.length;
            }
            Step::Need(need) => {
                assert!(need > stream.len() - at);
                return;
            }
            Step::Error(_) | Step::GiveBack => return,
        }
    }
}
