//! Tests the verifier's guarantees on random programs: accepted programs run with garbage in every register and on the stack.
//! A run that reads uninitialised memory would differ from a run with other garbage.

use proptest::prelude::*;

use crate::classic;
use crate::code::{Body, Code};
use crate::context::Context;
use crate::insn::Insn;
use crate::op::Op;
use crate::run::{FRAME_BYTES, Machine, Stop};
use crate::{ClassicInsn, Format, LoadOptions, Program, verifier};

const FUEL: u64 = 500;

/// Runs from registers and a stack full of `garbage`.
fn run(ops: &[Op], message: &[u8], garbage: u64, cb: [u32; 5]) -> (Result<u64, Stop>, Context, u64) {
    let mut context = Context { cb, ..Context::new() };
    let mut stack = [garbage as u8; FRAME_BYTES * crate::run::MAX_FRAMES];
    let mut machine = Machine { ops, message, context: &mut context, stack: &mut stack, fuel: FUEL };
    let result = machine.run_from(garbage);
    let fuel = machine.fuel;
    (result, context, fuel)
}

/// Checks all guarantees for one program. Returns false if the program was rejected.
fn holds_what_it_promises(
    code: &[Insn],
    states: usize,
    message: &[u8],
    cb: [u32; 5],
) -> Result<bool, TestCaseError> {
    let Ok(facts) = verifier::check_joining(code, states) else { return Ok(false) };
    let lowered = crate::lower::lower(&facts);
    let (first, context, fuel) = run(&lowered.ops, message, 0x5555_5555_5555_5555, cb);
    let (second, other_context, other_fuel) = run(&lowered.ops, message, 0xa3a3_a3a3_a3a3_a3a3, cb);
    prop_assert_eq!(format!("{first:?}"), format!("{second:?}"), "garbage was read");
    prop_assert_eq!((context, fuel), (other_context, other_fuel), "garbage was read");
    match first {
        Err(Stop::Unchecked(op)) => prop_assert!(false, "operation {} should have been rejected", op),
        Err(Stop::Packet(op)) => {
            let load = lowered.origin[op];
            prop_assert!(facts.variable.contains(&load), "the load {} was proven", load);
        }
        Err(Stop::Fuel(_)) => prop_assert_eq!(fuel, 0),
        _ => {}
    }
    Ok(true)
}

/// Replaces each rejected instruction by a jump to the next, until the program is accepted.
fn repair(mut code: Vec<Insn>, states: usize) -> Vec<Insn> {
    for _ in 0..code.len() {
        let Err((at, _)) = verifier::check_joining(&code, states) else { break };
        code[at] = Insn { code: 0x05, dst: 0, src: 0, off: 0, imm: 0 };
    }
    code
}

/// Instructions as a compiler might write them, often wrong.
fn plausible() -> impl Strategy<Value = Vec<Insn>> {
    let register = prop_oneof![4 => 0..10_u8, 1 => Just(10_u8)];
    let small =
        prop_oneof![Just(-8), Just(-16), Just(-4), Just(-1), Just(0), Just(1), Just(2), Just(8), Just(26)];
    let imm = prop_oneof![4 => small, 1 => any::<i32>()];
    let field = prop_oneof![Just(0_i16), Just(8), Just(48), Just(52), Just(68), Just(76), Just(80)];
    let near =
        prop_oneof![Just(-8_i16), Just(-16), Just(-4), Just(-12), Just(0), Just(1), Just(3), Just(-512)];
    let insn = (0..24_u8, register.clone(), register, imm, field, near, -6..7_i16);
    let insn = insn.prop_map(|(pick, dst, src, imm, field, near, jump)| {
        let raw = |code, dst, src, off, imm| Insn { code, dst, src, off, imm };
        let size = [0x00, 0x08, 0x10, 0x18][usize::from(src) % 4];
        match pick {
            0 => raw(0xb7, dst, 0, 0, imm),
            1 => raw(0xbf, dst, src, 0, 0),
            2 => raw(0x07, dst, 0, 0, imm),
            3 => raw(0x0f, dst, src, 0, 0),
            4 => raw(0x1f, dst, src, 0, 0),
            5 => raw(0x57, dst, 0, 0, imm & 0xff),
            6 => raw(0x61, dst, 1, field, 0),
            7 => raw(0x61, dst, 6, field, 0),
            8 => raw(0x61 | size, dst, src, near, 0),
            9 => raw(0x61 | size, dst, 10, near, 0),
            10 => raw(0x63 | size, 10, src, near, 0),
            11 => raw(0x62 | size, dst, 0, near, imm),
            12 => raw(0x7b, dst, src, near, 0),
            13 => raw(0x63, 6, src, field, 0),
            14 => raw(0x2d, dst, src, jump, 0),
            15 => raw(0xad, dst, src, jump, 0),
            16 => raw(0x15, dst, 0, jump, imm),
            17 => raw(0xa5, dst, 0, jump, imm),
            18 => raw(0x85, 0, 0, 0, 26),
            19 => raw(0x85, 0, 1, 0, i32::from(jump)),
            20 => raw(0x30, 0, 0, 0, imm),
            21 => raw(0x50, 0, src, 0, imm),
            22 => raw(0x05, 0, 0, jump, 0),
            _ => raw(0x95, 0, 0, 0, 0),
        }
    });
    proptest::collection::vec(insn, 0..24).prop_map(|body| {
        let raw = |code, dst, src, off, imm| Insn { code, dst, src, off, imm };
        // r6: context; r7: message; r8: its end. The message has at least four bytes. r0: an unknown number;
        // r9: r7 + r0.
        let mut code = vec![
            raw(0xbf, 6, 1, 0, 0),
            raw(0x61, 7, 1, 76, 0),
            raw(0x61, 8, 1, 80, 0),
            raw(0x61, 0, 1, 48, 0),
            raw(0xbf, 9, 7, 0, 0),
            raw(0x0f, 9, 0, 0, 0),
            raw(0xbf, 2, 7, 0, 0),
            raw(0x07, 2, 0, 0, 4),
            raw(0xbd, 2, 8, 1, 0),
            raw(0x95, 0, 0, 0, 0),
        ];
        code.extend(body);
        code.push(raw(0xb7, 0, 0, 0, 0));
        code.push(raw(0x95, 0, 0, 0, 0));
        code
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, max_global_rejects: 1_000_000, ..ProptestConfig::default() })]

    #[test]
    fn accepted_programs_keep_the_promises(
        code in plausible(),
        message in proptest::collection::vec(any::<u8>(), 0..24),
        cb: [u32; 5],
        small: bool,
    ) {
        let cb = if small { cb.map(|word| word % 9) } else { cb };
        // With one state every meeting of paths is a join.
        for states in [1, 2, 64] {
            holds_what_it_promises(&repair(code.clone(), states), states, &message, cb)?;
        }
    }

    #[test]
    fn random_bytes_are_rejected_or_run(
        bytes in proptest::collection::vec(any::<[u8; 8]>(), 0..12),
        message in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let bytes: Vec<u8> = bytes.concat();
        for format in [Format::Auto, Format::Raw, Format::Classic, Format::ClassicText, Format::Elf] {
            if let Ok(program) = Program::load(&bytes, &LoadOptions { format, name: None }) {
                let _ = program.run(&message, &mut Context::new(), &mut FUEL.clone());
            }
        }
    }

    #[test]
    fn classic_programs_read_no_garbage(
        picks in proptest::collection::vec((0..40_usize, 0..4_u8, 0..4_u8, 0..20_u32), 1..20),
        message in proptest::collection::vec(any::<u8>(), 0..24),
    ) {
        const CODES: [u16; 40] = [
            0x00, 0x01, 0x20, 0x28, 0x30, 0x40, 0x48, 0x50, 0x60, 0x61, 0x80, 0x81, 0xb1, 0x02, 0x03, 0x07, 0x87, 0x06,
            0x16, 0x05, 0x15, 0x1d, 0x25, 0x2d, 0x35, 0x3d, 0x45, 0x4d, 0x04, 0x0c, 0x14, 0x24, 0x34, 0x3c, 0x54, 0x64,
            0x74, 0x84, 0x9c, 0xac,
        ];
        let mut code: Vec<ClassicInsn> =
            picks.iter().map(|&(pick, jt, jf, k)| ClassicInsn { code: CODES[pick], jt, jf, k }).collect();
        code.push(ClassicInsn { code: 0x16, jt: 0, jf: 0, k: 0 });
        if let Ok(lowered) = classic::check(&code) {
            // A and X are 0 at the start by definition, so only scratch memory gets garbage.
            let (result, _, fuel) = run(&lowered.ops, &message, 0, [0; 5]);
            prop_assert!(!matches!(result, Err(Stop::Unchecked(_) | Stop::Packet(_) | Stop::Fuel(_))), "{:?}", result);
            prop_assert!(fuel > 0);
            let program = Code { body: Body::Classic(code) }.verify().expect("just accepted");
            let value = program.run(&message, &mut Context::new(), &mut FUEL.clone());
            let expected = match result {
                Ok(value) => value as u32,
                _ => 0,
            };
            prop_assert_eq!(value.map(i32::cast_unsigned), Ok(expected));
        }
    }
}

/// The generator is worth its time: most of its programs are accepted, and they are not all trivial.
#[test]
fn many_random_programs_are_accepted() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let accepted = (0..2000).filter(|_| {
        let code = repair(plausible().new_tree(&mut runner).expect("a program").current(), 64);
        holds_what_it_promises(&code, 64, &[1, 2, 3, 4, 5], [3; 5]).expect("promises")
    });
    let accepted = accepted.count();
    assert!(accepted > 1000, "{accepted} of 2000 programs accepted");
}
