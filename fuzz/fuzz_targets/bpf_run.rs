//! Programs that the checker accepts, over any message and state: no panic, no access that the checker should have
//! refused, never more than the fuel, and the same answer twice.
//!
//! Input: the number of message bytes, the state's words, the message, then instructions. Each one that is refused
//! becomes a jump to the next, so that most inputs are programs.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_bpf::{Code, Context, Format, LoadOptions, Program, RunError};

const FUEL: u64 = 3000;
const NEXT: [u8; 8] = [0x05, 0, 0, 0, 0, 0, 0, 0];
const EXIT: [u8; 16] = [0xb7, 0, 0, 0, 0, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0];

fuzz_target!(|data: &[u8]| {
    let Some((&[length, cb0, cb1, shape], rest)) = data.split_first_chunk() else { return };
    let Some((message, code)) = rest.split_at_checked(usize::from(length)) else { return };
    let cb = [u32::from(cb0), u32::MAX - u32::from(cb1), 0, 1 << (cb0 % 32), u32::from(cb1)];
    let format = if shape % 4 == 0 { Format::Classic } else { Format::Raw };
    let Some(program) = accepted(code, format) else { return };

    let run = || {
        let mut context = Context { cb, ..Context::new() };
        let mut fuel = FUEL;
        let result = program.run(message, &mut context, &mut fuel);
        (result, context, fuel)
    };
    let (result, context, fuel) = run();
    assert!(!matches!(result, Err(RunError::Unchecked { .. })), "{result:?}");
    assert!(fuel <= FUEL);
    if let Err(RunError::OutOfFuel { .. }) = result {
        assert_eq!(fuel, 0);
        assert!(!program.stats().classic || program.stats().operations as u64 > FUEL, "classic BPF has no loops");
    }
    if program.stats().variable_loads == 0 {
        assert!(!matches!(result, Err(RunError::OutsideMessage { .. })), "{result:?}");
    }
    assert_eq!(run(), (result, context, fuel));
});

/// The program, with what is refused taken out.
fn accepted(code: &[u8], format: Format) -> Option<Program> {
    let mut code = code[..code.len() / 8 * 8].to_vec();
    if format == Format::Raw {
        // Random bytes reach a load from the message rarely: the program begins with the context in r6, the message
        // in r7, and a number in r0.
        let head = [[0xbf, 0x16, 0, 0, 0, 0, 0, 0], [0x61, 0x17, 76, 0, 0, 0, 0, 0], [0x61, 0x10, 48, 0, 0, 0, 0, 0]];
        code.splice(0..0, head.concat());
        code.extend(EXIT);
    } else {
        code.extend([0x16, 0, 0, 0, 0, 0, 0, 0]);
    }
    for _ in 0..64 {
        let listed = Code::load(&code, &LoadOptions { format, name: None }).ok()?;
        match listed.verify() {
            Ok(program) => return Some(program),
            Err(error) => {
                let slot = code.get_mut(error.instruction * 8..)?.first_chunk_mut::<8>()?;
                *slot = NEXT;
            }
        }
    }
    None
}
