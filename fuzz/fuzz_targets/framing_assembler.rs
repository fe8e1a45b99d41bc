//! Every preset, any bytes, any cuts: the messages are those of the whole stream, they lie behind each other, and what goes in
//! is what comes out and what is left.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_mux::Time;
use towpath_mux::assembler::{Assembler, Event, Limits};
use towpath_mux::framing::{Framing, PRESETS, State};

fuzz_target!(|input: &[u8]| {
    let [preset, size, midstream, stream @ ..] = input else { return };
    let preset = PRESETS[usize::from(*preset) % PRESETS.len()].name;
    let framing = Framing::preset(preset).expect("a preset");
    let state = State { midstream: midstream & 1 != 0, ..State::default() };
    let whole = run(&framing, &state, stream, usize::MAX);
    assert_eq!(run(&framing, &state, stream, usize::from(*size) + 1), whole, "{preset}");
    assert_eq!(run(&framing, &state, stream, 1), whole, "{preset}");
});

fn run(framing: &Framing, state: &State, stream: &[u8], size: usize) -> Vec<String> {
    let limits = Limits { message: 1 << 16, head: 1 << 10, ..Limits::default() };
    let mut assembler = Assembler::with_state(framing.clone(), limits, state.clone());
    let mut events = Vec::new();
    let mut end = 0;
    // After an upgrade, the messages of http1 are what arrived.
    let mut raw = 0;
    let mut drain = |assembler: &mut Assembler| {
        while let Some(event) = assembler.poll(Time::default()) {
            events.push(match event {
                Event::Message(message) => {
                    assert_eq!(message.offset, end);
                    end += message.bytes.len() as u64;
                    assert_eq!(message.bytes, &stream[message.offset as usize..end as usize]);
                    if framing.name() == "http1" && message.mark == 1 {
                        raw += message.bytes.len();
                        continue;
                    }
                    format!("{message:?}")
                }
                Event::GiveBack { offset, .. } => format!("give back at {offset}"),
                Event::Failed(failure) => format!("at {}: {}", failure.offset, failure.cause),
                Event::End { offset, inside, .. } => {
                    assert_eq!(offset as usize + inside, stream.len());
                    format!("end at {offset}, {inside} inside")
                }
            });
        }
    };
    for piece in stream.chunks(size.min(stream.len().max(1))) {
        let mut rest = piece;
        while !rest.is_empty() && !assembler.is_over() {
            let took = assembler.handle_bytes(rest);
            rest = &rest[took..];
            drain(&mut assembler);
        }
    }
    assembler.handle_end();
    drain(&mut assembler);
    events.push(format!("{raw} raw"));
    events
}
