//! Every instruction in every width, one per row: operands and result.

use crate::asm::{
    self, B, CB, DATA, DATA_END, DW, EXIT, H, HASH, LEN, MARK, W, add, add_reg, bytes, call, copy, helper,
    ja, jeq, jgt, load, load_imm, mov, program, raw, store, store_imm,
};
use towpath_bpf::{Context, Format, Insn, LoadOptions, Program, RunError};

const FUEL: u64 = 1000;

/// Runs a program over a message. Returns its result and its context.
fn run(code: &[Insn], message: &[u8]) -> (i32, Context) {
    let mut context = Context::new();
    let result = program(code).run(message, &mut context, &mut FUEL.clone());
    (result.unwrap_or_else(|error| panic!("{error}\n{}", asm::listing(code))), context)
}

/// Runs instructions on r1 = a and r2 = b. Returns r1.
fn compute(a: u64, b: u64, middle: &[Insn]) -> u64 {
    let mut code = vec![copy(6, 1)];
    code.extend(load_imm(1, a));
    code.extend(load_imm(2, b));
    code.extend(middle);
    code.extend([store(DW, 6, CB, 1), mov(0, 0), EXIT]);
    let (_, context) = run(&code, &[]);
    u64::from(context.cb[0]) | u64::from(context.cb[1]) << 32
}

const MIN: u64 = 1 << 63;
const NEG: u64 = u64::MAX;

/// Name, operation bits, off, a, b, 64-bit result, 32-bit result.
#[rustfmt::skip]
const ALU: &[(&str, u8, i16, u64, u64, u64, u64)] = &[
    ("add",         0x00, 0, 1, 2, 3, 3),
    ("add carries", 0x00, 0, 0xffff_ffff, 1, 0x1_0000_0000, 0),
    ("add wraps",   0x00, 0, NEG, 2, 1, 1),
    ("sub",         0x10, 0, 7, 9, (-2_i64).cast_unsigned(), 0xffff_fffe),
    ("mul",         0x20, 0, 0x1_0000_0001, 3, 0x3_0000_0003, 3),
    ("mul signed",  0x20, 0, 5, NEG, (-5_i64).cast_unsigned(), 0xffff_fffb),
    ("div",         0x30, 0, 100, 7, 14, 14),
    ("div of high", 0x30, 0, 0x5_0000_0009, 2, 0x2_8000_0004, 4),
    ("div sign",    0x30, 0, 10, NEG, 0, 0),
    ("sdiv",        0x30, 1, (-100_i64).cast_unsigned(), 7, (-14_i64).cast_unsigned(), 0xffff_fff2),
    ("sdiv min",    0x30, 1, MIN | 0x8000_0000, NEG, (MIN | 0x8000_0000).wrapping_neg(), 0x8000_0000),
    ("or",          0x40, 0, 0xf0_0000_000f, 0x70, 0xf0_0000_007f, 0x7f),
    ("or signed",   0x40, 0, 1, (-2_i64).cast_unsigned(), NEG, 0xffff_ffff),
    ("and",         0x50, 0, 0xff_0000_00ff, 0x71, 0x71, 0x71),
    ("and signed",  0x50, 0, 0xff_0000_00ff, (-16_i64).cast_unsigned(), 0xff_0000_00f0, 0xf0),
    ("lsh",         0x60, 0, 0x8000_0001, 4, 0x8_0000_0010, 0x10),
    ("rsh",         0x70, 0, 0xf000_0000_8000_0000, 4, 0x0f00_0000_0800_0000, 0x0800_0000),
    ("mod",         0x90, 0, 100, 7, 2, 2),
    ("mod of high", 0x90, 0, 0x1_0000_0005, 3, 0, 2),
    ("smod",        0x90, 1, (-100_i64).cast_unsigned(), 7, (-2_i64).cast_unsigned(), 0xffff_fffe),
    ("smod by neg", 0x90, 1, 100, (-7_i64).cast_unsigned(), 2, 2),
    ("smod min",    0x90, 1, MIN | 0x8000_0000, NEG, 0, 0),
    ("xor",         0xa0, 0, 0xff_0000_00ff, 0x0f, 0xff_0000_00f0, 0xf0),
    ("mov",         0xb0, 0, 7, 0x1234, 0x1234, 0x1234),
    ("mov signed",  0xb0, 0, 7, NEG, NEG, 0xffff_ffff),
    ("arsh",        0xc0, 0, 0xf000_0000_8000_0000, 4, 0xff00_0000_0800_0000, 0xf800_0000),
];

#[test]
fn arithmetic() {
    for &(name, op, off, a, b, wide, narrow) in ALU {
        let register = [raw(0x0f | op, 1, 2, off, 0), raw(0x0c | op, 1, 2, off, 0)];
        assert_eq!(compute(a, b, &register[..1]), wide, "{name}, 64 bits, register");
        assert_eq!(compute(a, b, &register[1..]), narrow, "{name}, 32 bits, register");
        let Ok(imm) = i32::try_from(b.cast_signed()) else { continue };
        assert_eq!(compute(a, 0, &[raw(0x07 | op, 1, 0, off, imm)]), wide, "{name}, 64 bits, constant");
        assert_eq!(compute(a, 0, &[raw(0x04 | op, 1, 0, off, imm)]), narrow, "{name}, 32 bits, constant");
    }
}

/// Operations that are valid with a register only: name, code, off, a, b, result.
#[rustfmt::skip]
const BY_REGISTER: &[(&str, u8, i16, u64, u64, u64)] = &[
    ("div by 0",          0x3f, 0, 9, 0, 0),
    ("div32 by 0",        0x3c, 0, 9 << 32 | 9, 1 << 32, 0),
    ("sdiv by 0",         0x3f, 1, 9, 0, 0),
    ("sdiv32 by 0",       0x3c, 1, 9, 0, 0),
    ("mod by 0",          0x9f, 0, 9 << 32, 0, 9 << 32),
    ("mod32 by 0",        0x9c, 0, 9 << 32 | 8, 0, 8),
    ("smod by 0",         0x9f, 1, NEG, 0, NEG),
    ("smod32 by 0",       0x9c, 1, NEG, 0, 0xffff_ffff),
    ("lsh by 65",         0x6f, 0, 3, 65, 6),
    ("lsh32 by 33",       0x6c, 0, 3, 33, 6),
    ("rsh by 64",         0x7f, 0, 3, 64, 3),
    ("rsh32 by 32",       0x7c, 0, 3 | 1 << 32, 32, 3),
    ("arsh by 67",        0xcf, 0, MIN, 67, MIN | MIN >> 1 | MIN >> 2 | MIN >> 3),
    ("movsx 8",           0xbf, 8, 0, 0x1280, (-128_i64).cast_unsigned()),
    ("movsx 16",          0xbf, 16, 0, 0x17fff, 0x7fff),
    ("movsx 32",          0xbf, 32, 0, 0x1_8000_0000, (-(1_i64 << 31)).cast_unsigned()),
    ("movsx32 8",         0xbc, 8, 0, 0x12ff, 0xffff_ffff),
    ("movsx32 16",        0xbc, 16, 0, 0x8000, 0xffff_8000),
];

#[test]
fn arithmetic_by_register() {
    for &(name, code, off, a, b, result) in BY_REGISTER {
        assert_eq!(compute(a, b, &[raw(code, 1, 2, off, 0)]), result, "{name}");
    }
}

/// Name, code, imm, a, result.
#[rustfmt::skip]
const UNARY: &[(&str, u8, i32, u64, u64)] = &[
    ("neg",    0x87, 0, 5, (-5_i64).cast_unsigned()),
    ("neg32",  0x84, 0, 5, 0xffff_fffb),
    ("le16",   0xd4, 16, 0x1122_3344_5566_7788, 0x7788),
    ("le32",   0xd4, 32, 0x1122_3344_5566_7788, 0x5566_7788),
    ("le64",   0xd4, 64, 0x1122_3344_5566_7788, 0x1122_3344_5566_7788),
    ("be16",   0xdc, 16, 0x1122_3344_5566_7788, 0x8877),
    ("be32",   0xdc, 32, 0x1122_3344_5566_7788, 0x8877_6655),
    ("be64",   0xdc, 64, 0x1122_3344_5566_7788, 0x8877_6655_4433_2211),
    ("bswap16", 0xd7, 16, 0x1122_3344_5566_7788, 0x8877),
    ("bswap32", 0xd7, 32, 0x1122_3344_5566_7788, 0x8877_6655),
    ("bswap64", 0xd7, 64, 0x1122_3344_5566_7788, 0x8877_6655_4433_2211),
];

#[test]
fn unary() {
    for &(name, code, imm, a, result) in UNARY {
        assert_eq!(compute(a, 0, &[raw(code, 1, 0, 0, imm)]), result, "{name}");
    }
}

/// Name, operation bits, a, b, taken with 64 bits, taken with 32 bits.
#[rustfmt::skip]
const JUMPS: &[(&str, u8, u64, u64, bool, bool)] = &[
    ("jeq",        0x10, 5, 5, true, true),
    ("jeq high",   0x10, 1 << 32 | 5, 5, false, true),
    ("jeq not",    0x10, 5, 6, false, false),
    ("jeq sign",   0x10, NEG, NEG, true, true),
    ("jgt",        0x20, 6, 5, true, true),
    ("jgt equal",  0x20, 5, 5, false, false),
    ("jgt sign",   0x20, NEG, 5, true, true),
    ("jgt high",   0x20, 1 << 32, 5, true, false),
    ("jge",        0x30, 5, 5, true, true),
    ("jge less",   0x30, 4, 5, false, false),
    ("jset",       0x40, 6, 2, true, true),
    ("jset not",   0x40, 5, 2, false, false),
    ("jset high",  0x40, 1 << 40, NEG, true, false),
    ("jne",        0x50, 5, 6, true, true),
    ("jne high",   0x50, 1 << 32 | 5, 5, true, false),
    ("jsgt",       0x60, 0, NEG, true, true),
    ("jsgt not",   0x60, NEG, 0, false, false),
    ("jsgt half",  0x60, 0x8000_0000, 0, true, false),
    ("jsge",       0x70, NEG, NEG, true, true),
    ("jsge not",   0x70, NEG, 0, false, false),
    ("jlt",        0xa0, 4, 5, true, true),
    ("jlt equal",  0xa0, 5, 5, false, false),
    ("jle",        0xb0, 5, 5, true, true),
    ("jle more",   0xb0, 6, 5, false, false),
    ("jslt",       0xc0, NEG, 0, true, true),
    ("jslt half",  0xc0, 0x8000_0000, 0, false, true),
    ("jsle",       0xd0, NEG, NEG, true, true),
    ("jsle more",  0xd0, 1, NEG, false, false),
];

#[test]
fn jumps() {
    for &(name, op, a, b, wide, narrow) in JUMPS {
        // r1: whether the jump was taken. The numbers are loaded from cb, so that the verifier does not know them.
        let taken = |jump: Insn| {
            let mut context = Context::new();
            context.cb = [a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32, 0];
            let code = [load(DW, 2, 1, CB), load(DW, 3, 1, CB + 8), mov(0, 1), jump, mov(0, 0), EXIT];
            program(&code).run(&[], &mut context, &mut FUEL.clone()) == Ok(1)
        };
        assert_eq!(taken(raw(0x0d | op, 2, 3, 1, 0)), wide, "{name}, 64 bits, register");
        assert_eq!(taken(raw(0x0e | op, 2, 3, 1, 0)), narrow, "{name}, 32 bits, register");
        let Ok(imm) = i32::try_from(b.cast_signed()) else { continue };
        assert_eq!(taken(raw(0x05 | op, 2, 0, 1, imm)), wide, "{name}, 64 bits, constant");
        assert_eq!(taken(raw(0x06 | op, 2, 0, 1, imm)), narrow, "{name}, 32 bits, constant");
        // The same with constants: the verifier knows both numbers and follows one side.
        let mut code = Vec::from(load_imm(2, a));
        code.extend(load_imm(3, b));
        code.extend([mov(0, 1), raw(0x0d | op, 2, 3, 1, 0), mov(0, 0), EXIT]);
        assert_eq!(run(&code, &[]).0 == 1, wide, "{name}, constants");
    }
}

#[test]
fn long_jump() {
    // gotol: the distance is in the immediate.
    assert_eq!(run(&[mov(0, 1), raw(0x06, 0, 0, 0, 1), mov(0, 2), EXIT], &[]).0, 1);
}

/// Code of the load, and its result from the message and from the stack.
#[rustfmt::skip]
const LOADS: &[(u8, u64)] = &[
    (0x71, 0x81),
    (0x69, 0x8281),
    (0x61, 0x8483_8281),
    (0x79, 0x8887_8685_8483_8281),
    (0x91, 0xffff_ffff_ffff_ff81),
    (0x89, 0xffff_ffff_ffff_8281),
    (0x81, 0xffff_ffff_8483_8281),
];

#[test]
fn loads_from_message_and_stack() {
    let message = [0, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88];
    for &(code, value) in LOADS {
        let head =
            [copy(6, 1), load(W, 2, 1, DATA), load(W, 3, 1, DATA_END), copy(4, 2), add(4, 9), mov(0, 0)];
        let mut from_message = Vec::from(head);
        from_message.extend([jgt(4, 3, 2), raw(code, 5, 2, 1, 0), store(DW, 6, CB, 5), EXIT]);
        let mut from_stack = vec![copy(6, 1)];
        from_stack.extend(load_imm(2, 0x8887_8685_8483_8281));
        from_stack.extend([
            store(DW, 10, -16, 2),
            raw(code, 5, 10, -16, 0),
            store(DW, 6, CB, 5),
            mov(0, 0),
            EXIT,
        ]);
        for program in [from_message, from_stack] {
            let (_, context) = run(&program, &message);
            assert_eq!(u64::from(context.cb[0]) | u64::from(context.cb[1]) << 32, value, "{code:#x}");
        }
    }
}

#[test]
fn stores_to_stack() {
    const VALUE: u64 = 0x8887_8685_8483_8281;
    for (size, mask) in [(B, 0xff), (H, 0xffff), (W, 0xffff_ffff), (DW, u64::MAX)] {
        let mut code = vec![copy(6, 1)];
        code.extend(load_imm(2, VALUE));
        code.extend([mov(3, 0), store(DW, 10, -8, 3), store(size, 10, -8, 2), load(DW, 1, 10, -8)]);
        code.extend([store(DW, 6, CB, 1), mov(0, 0), EXIT]);
        let (_, context) = run(&code, &[]);
        assert_eq!(
            u64::from(context.cb[0]) | u64::from(context.cb[1]) << 32,
            VALUE & mask,
            "register, {size:#x}"
        );
        let code = [
            copy(6, 1),
            store_imm(DW, 10, -8, 0),
            store_imm(size, 10, -8, -2),
            load(DW, 1, 10, -8),
            store(DW, 6, CB, 1),
            mov(0, 0),
            EXIT,
        ];
        let (_, context) = run(&code, &[]);
        let value = u64::from(context.cb[0]) | u64::from(context.cb[1]) << 32;
        assert_eq!(value, (-2_i64).cast_unsigned() & mask, "constant, {size:#x}");
    }
}

#[test]
fn context_fields() {
    let message = [7; 0x0102];
    // Result of each load: offset, size, value. cb is 0x11111111 ... 0x55555555, mark and hash are written first.
    #[rustfmt::skip]
    let rows = [
        (LEN, W, 0x0102), (LEN, H, 0x0102), (LEN, B, 0x02), (LEN + 1, B, 0x01), (LEN + 2, H, 0),
        (MARK, W, 0x0a0b_0c0d), (MARK + 3, B, 0x0a), (HASH, W, 0x1a1b_1c1d), (HASH + 2, H, 0x1a1b),
        (CB, W, 0x1111_1111), (CB + 4, W, 0x2222_2222), (CB + 16, W, 0x5555_5555),
        (CB + 5, B, 0x22), (CB + 18, H, 0x5555),
    ];
    for (off, size, value) in rows {
        let mut context = Context { cb: [1, 2, 3, 4, 5].map(|n| n * 0x1111_1111), mark: 77, hash: 78 };
        let code = [
            load(W, 4, 1, MARK),
            store_imm(W, 1, MARK, 0x0a0b_0c0d),
            mov(2, 0x1a1b_1c1d),
            store(W, 1, HASH, 2),
            load(size, 0, 1, off),
            add_reg(0, 4),
            EXIT,
        ];
        let result = program(&code).run(&message, &mut context, &mut FUEL.clone());
        assert_eq!(result, Ok(value), "offset {off}, size {size:#x}; mark began as 0");
        assert_eq!((context.mark, context.hash), (0x0a0b_0c0d, 0x1a1b_1c1d));
    }
}

#[test]
fn cb_persists_and_is_written_in_every_width() {
    let code = [
        store_imm(B, 1, CB + 1, 0x7f),
        store_imm(H, 1, CB + 6, 0x1234),
        store_imm(DW, 1, CB + 8, -1),
        load(W, 0, 1, CB + 16),
        add(0, 1),
        store(W, 1, CB + 16, 0),
        store(W, 1, MARK, 0),
        EXIT,
    ];
    let program = program(&code);
    let mut context = Context::new();
    for turn in 1..=3 {
        assert_eq!(program.run(&[], &mut context, &mut FUEL.clone()), Ok(turn));
        assert_eq!(context.cb, [0x7f00, 0x1234_0000, u32::MAX, u32::MAX, turn.cast_unsigned()]);
        assert_eq!(context.mark, turn.cast_unsigned());
    }
}

#[test]
fn network_loads() {
    let message = [0x80, 1, 2, 3, 4];
    // Code, offset, added register; the result, 99 if the program continued after the load.
    #[rustfmt::skip]
    let rows: &[(u8, i32, u64, i32)] = &[
        (0x30, 0, 0, 0x80), (0x28, 0, 0, 0x8001), (0x20, 0, 0, 0x8001_0203_u32.cast_signed()), (0x20, 1, 0, 0x0102_0304),
        (0x30, 4, 0, 4), (0x30, 5, 0, 0), (0x28, 4, 0, 0), (0x20, 2, 0, 0), (0x20, i32::MAX, 0, 0),
        (0x50, 1, 3, 4), (0x50, 1, 4, 0), (0x48, -1, 2, 0x0102), (0x40, 0, 1, 0x0102_0304), (0x40, 0, 2, 0),
        (0x50, 0, u64::MAX, 0), (0x50, 0, 1 << 32, 0x80), (0x50, 0, 1 << 31, 0), (0x40, -2, 1, 0),
    ];
    for &(code, at, register, result) in rows {
        let mut program = vec![copy(6, 1)];
        program.extend(load_imm(7, register));
        let indirect = code & 0x40 != 0;
        program.extend([raw(code, 0, if indirect { 7 } else { 0 }, 0, at), EXIT]);
        assert_eq!(run(&program, &message).0, result, "{code:#x} at {at} + {register:#x}");
    }
    // A load out of range ends the program at once.
    assert_eq!(run(&[copy(6, 1), raw(0x20, 0, 0, 0, 2), mov(0, 99), EXIT], &message).0, 0);
}

#[test]
fn skb_load_bytes() {
    let message = [1, 2, 3, 4, 5, 6];
    for (offset, length, result, bytes) in [
        (0_u32, 4, 0, 0x0403_0201_u32),
        (2, 4, 0, 0x0605_0403),
        (5, 1, 0, 0xeeee_ee06),
        (3, 4, -14, 0),
        (u32::MAX, 1, -14, 0xeeee_ee00),
    ] {
        let code = [
            copy(6, 1),
            store_imm(W, 10, -4, 0xeeee_eeee_u32.cast_signed()),
            mov(2, offset.cast_signed()),
            copy(3, 10),
            add(3, -4),
            mov(4, length),
            helper(26),
            load(W, 1, 10, -4),
            store(W, 6, CB, 1),
            EXIT,
        ];
        let (value, context) = run(&code, &message);
        assert_eq!((value, context.cb[0]), (result, bytes), "{length} bytes at {offset}");
    }
}

#[test]
fn calls_keep_r6_to_r9_and_their_own_stack() {
    let code = [
        mov(6, 60),
        mov(9, 90),
        store_imm(DW, 10, -8, 7),
        copy(1, 10),
        add(1, -8),
        call(5),
        add_reg(0, 6),
        add_reg(0, 9),
        load(DW, 1, 10, -8),
        add_reg(0, 1),
        EXIT,
        // r0 = *r1; the caller's word becomes 1000.
        mov(6, 1),
        mov(9, 2),
        store_imm(DW, 10, -8, 3),
        load(DW, 0, 1, 0),
        store_imm(DW, 1, 0, 1000),
        EXIT,
    ];
    assert_eq!(run(&code, &[]).0, 7 + 60 + 90 + 1000);
}

#[test]
fn eight_functions_deep() {
    // Function n stores n, calls n + 1, and adds the stored number: 1 + 2 + ... + 8.
    let mut code = Vec::new();
    for n in 1..=8 {
        code.push(store_imm(W, 10, -512, n));
        if n < 8 {
            code.push(call(3));
        } else {
            code.push(mov(0, 0));
        }
        code.extend([load(W, 1, 10, -512), add_reg(0, 1), EXIT]);
    }
    let program = program(&code);
    assert_eq!(program.run(&[], &mut Context::new(), &mut FUEL.clone()), Ok(36));
    assert_eq!((program.stats().depth, program.stats().stack), (8, 4096));
}

#[test]
fn pointers_survive_the_stack() {
    let code = [
        load(W, 2, 1, DATA),
        load(W, 3, 1, DATA_END),
        store(DW, 10, -8, 2),
        store(DW, 10, -16, 1),
        copy(4, 2),
        add(4, 2),
        mov(0, 0),
        jgt(4, 3, 4),
        load(DW, 5, 10, -8),
        load(B, 0, 5, 1),
        load(DW, 5, 10, -16),
        load(W, 1, 5, LEN),
        EXIT,
    ];
    assert_eq!(run(&code, &[8, 9, 10]).0, 9);
    assert_eq!(run(&code, &[8]).0, 0);
}

#[test]
fn fuel_bounds_every_loop() {
    // An endless loop is accepted: it ends when the fuel is used up.
    let endless = program(&[mov(0, 0), ja(-1), EXIT]);
    let mut fuel = 12345;
    let error = endless.run(&[], &mut Context::new(), &mut fuel);
    assert_eq!((error, fuel), (Err(RunError::OutOfFuel { instruction: 1 }), 0));

    // Five instructions are five units: four do not suffice.
    let five = program(&[mov(0, 1), mov(1, 2), mov(2, 3), mov(3, 4), EXIT]);
    let mut fuel = 5;
    assert_eq!((five.run(&[], &mut Context::new(), &mut fuel), fuel), (Ok(1), 0));
    let mut fuel = 4;
    let error = five.run(&[], &mut Context::new(), &mut fuel);
    assert_eq!((error, fuel), (Err(RunError::OutOfFuel { instruction: 4 }), 0));

    // skb_load_bytes of 512 bytes costs 1 + 64.
    let copying = program(&[mov(2, 0), copy(3, 10), add(3, -512), mov(4, 512), helper(26), EXIT]);
    let mut fuel = 100;
    assert_eq!((copying.run(&[0; 600], &mut Context::new(), &mut fuel), fuel), (Ok(0), 100 - 6 - 64));
    let mut fuel = 60;
    let error = copying.run(&[0; 600], &mut Context::new(), &mut fuel);
    assert_eq!((error, fuel), (Err(RunError::OutOfFuel { instruction: 4 }), 0));
}

#[test]
fn a_pointer_that_wraps_around_is_caught() {
    // The message's start minus 8, by adding 2^64 - 8: below data_end, but outside the message.
    let mut code = vec![load(W, 2, 1, DATA), load(W, 3, 1, DATA_END), load(DW, 4, 1, CB), add_reg(2, 4)];
    code.extend([copy(5, 2), add(5, 4), mov(0, 0), jgt(5, 3, 1), load(W, 0, 2, 0), EXIT]);
    let program = program(&code);
    let mut context = Context { cb: [u32::MAX - 7, u32::MAX, 0, 0, 0], ..Context::new() };
    let error = program.run(&[1; 16], &mut context, &mut FUEL.clone());
    assert_eq!(error, Err(RunError::OutsideMessage { instruction: 8 }));
    context.cb = [2, 0, 0, 0, 0];
    assert_eq!(program.run(&[1; 16], &mut context, &mut FUEL.clone()), Ok(0x0101_0101));
}

#[test]
fn loops_over_the_stack_are_followed() {
    // Fills 16 bytes and sums them: the verifier finds the bound of the index.
    let code = [
        mov(1, 0),
        copy(2, 10),
        add(2, -16),
        add_reg(2, 1),
        store(B, 2, 0, 1),
        add(1, 1),
        raw(0xa5, 1, 0, -6, 16),
        mov(0, 0),
        mov(1, 0),
        copy(2, 10),
        add(2, -16),
        add_reg(2, 1),
        load(B, 3, 2, 0),
        add_reg(0, 3),
        add(1, 1),
        raw(0xa5, 1, 0, -7, 16),
        EXIT,
    ];
    assert_eq!(run(&code, &[]).0, 120);
}

// Classic BPF.

/// Name; statements: code, jt, jf, k; the message; the result.
type ClassicRow = (&'static str, &'static [[u32; 4]], &'static [u8], u32);

#[rustfmt::skip]
const CLASSIC: &[ClassicRow] = &[
    ("ret #k",    &[[0x06, 0, 0, 7]], &[], 7),
    ("ret a",     &[[0x00, 0, 0, 9], [0x16, 0, 0, 0]], &[], 9),
    ("a, x start at 0", &[[0x0c, 0, 0, 0], [0x16, 0, 0, 0]], &[], 0),
    ("ld [k]",    &[[0x20, 0, 0, 1], [0x16, 0, 0, 0]], &[0, 1, 2, 3, 4], 0x0102_0304),
    ("ldh [k]",   &[[0x28, 0, 0, 1], [0x16, 0, 0, 0]], &[0, 1, 2], 0x0102),
    ("ldb [k]",   &[[0x30, 0, 0, 2], [0x16, 0, 0, 0]], &[0, 1, 2], 2),
    ("ldb out",   &[[0x30, 0, 0, 3], [0x06, 0, 0, 5]], &[0, 1, 2], 0),
    ("ld [x+k]",  &[[0x01, 0, 0, 1], [0x40, 0, 0, 1], [0x16, 0, 0, 0]], &[0, 1, 2, 3, 4, 5], 0x0203_0405),
    ("ldh [x+k]", &[[0x01, 0, 0, 1], [0x48, 0, 0, 1], [0x16, 0, 0, 0]], &[0, 1, 2, 3], 0x0203),
    ("ldb [x+k]", &[[0x01, 0, 0, 3], [0x50, 0, 0, u32::MAX], [0x16, 0, 0, 0]], &[0, 1, 2, 3], 2),
    ("ldb [x+k] out", &[[0x01, 0, 0, 3], [0x50, 0, 0, 1], [0x06, 0, 0, 5]], &[0, 1, 2, 3], 0),
    ("ldx msh",   &[[0xb1, 0, 0, 0], [0x87, 0, 0, 0], [0x16, 0, 0, 0]], &[0x45], 20),
    ("ldx msh out", &[[0xb1, 0, 0, 1], [0x06, 0, 0, 5]], &[0x45], 0),
    ("ld #len",   &[[0x80, 0, 0, 0], [0x16, 0, 0, 0]], &[0; 300], 300),
    ("ldx #len",  &[[0x81, 0, 0, 0], [0x87, 0, 0, 0], [0x16, 0, 0, 0]], &[0; 300], 300),
    ("st, ldx M", &[[0x00, 0, 0, 6], [0x02, 0, 0, 15], [0x61, 0, 0, 15], [0x87, 0, 0, 0], [0x16, 0, 0, 0]], &[], 6),
    ("stx, ld M", &[[0x01, 0, 0, 6], [0x03, 0, 0, 0], [0x60, 0, 0, 0], [0x16, 0, 0, 0]], &[], 6),
    ("tax",       &[[0x00, 0, 0, 6], [0x07, 0, 0, 0], [0x0c, 0, 0, 0], [0x16, 0, 0, 0]], &[], 12),
    ("add wraps", &[[0x00, 0, 0, u32::MAX], [0x04, 0, 0, 2], [0x16, 0, 0, 0]], &[], 1),
    ("sub",       &[[0x00, 0, 0, 5], [0x14, 0, 0, 7], [0x16, 0, 0, 0]], &[], u32::MAX - 1),
    ("mul",       &[[0x00, 0, 0, 5], [0x24, 0, 0, 7], [0x16, 0, 0, 0]], &[], 35),
    ("div",       &[[0x00, 0, 0, u32::MAX], [0x34, 0, 0, 2], [0x16, 0, 0, 0]], &[], 0x7fff_ffff),
    ("div x = 0", &[[0x00, 0, 0, 5], [0x3c, 0, 0, 0], [0x06, 0, 0, 5]], &[], 0),
    ("mod x = 0", &[[0x00, 0, 0, 5], [0x9c, 0, 0, 0], [0x06, 0, 0, 5]], &[], 0),
    ("mod",       &[[0x00, 0, 0, 5], [0x94, 0, 0, 3], [0x16, 0, 0, 0]], &[], 2),
    ("or",        &[[0x00, 0, 0, 5], [0x44, 0, 0, 2], [0x16, 0, 0, 0]], &[], 7),
    ("and",       &[[0x00, 0, 0, 5], [0x54, 0, 0, 4], [0x16, 0, 0, 0]], &[], 4),
    ("lsh",       &[[0x00, 0, 0, 5], [0x64, 0, 0, 31], [0x16, 0, 0, 0]], &[], 1 << 31),
    ("rsh",       &[[0x00, 0, 0, 1 << 31], [0x74, 0, 0, 31], [0x16, 0, 0, 0]], &[], 1),
    ("xor",       &[[0x00, 0, 0, 5], [0xa4, 0, 0, 1], [0x16, 0, 0, 0]], &[], 4),
    ("neg",       &[[0x00, 0, 0, 5], [0x84, 0, 0, 0], [0x16, 0, 0, 0]], &[], u32::MAX - 4),
    ("ja",        &[[0x05, 0, 0, 1], [0x06, 0, 0, 1], [0x06, 0, 0, 2]], &[], 2),
    ("jeq yes",   &[[0x15, 1, 0, 0], [0x06, 0, 0, 1], [0x06, 0, 0, 2]], &[], 2),
    ("jeq no",    &[[0x15, 1, 0, 9], [0x06, 0, 0, 1], [0x06, 0, 0, 2]], &[], 1),
    ("jeq else",  &[[0x15, 0, 1, 9], [0x06, 0, 0, 1], [0x06, 0, 0, 2]], &[], 2),
    ("jgt both",  &[[0x00, 0, 0, 9], [0x25, 2, 1, 8], [0x06, 0, 0, 1], [0x06, 0, 0, 2], [0x06, 0, 0, 3]], &[], 3),
    ("jgt both not", &[[0x00, 0, 0, 9], [0x25, 2, 1, 9], [0x06, 0, 0, 1], [0x06, 0, 0, 2], [0x06, 0, 0, 3]], &[], 2),
    ("jge",       &[[0x00, 0, 0, 9], [0x35, 0, 1, 9], [0x06, 0, 0, 1], [0x06, 0, 0, 2]], &[], 1),
    ("jge unsigned", &[[0x00, 0, 0, u32::MAX], [0x35, 0, 1, 9], [0x06, 0, 0, 1], [0x06, 0, 0, 2]], &[], 1),
    ("jset else", &[[0x00, 0, 0, 4], [0x45, 0, 1, 3], [0x06, 0, 0, 1], [0x06, 0, 0, 2]], &[], 2),
    ("jset x",    &[[0x00, 0, 0, 4], [0x01, 0, 0, 6], [0x4d, 0, 1, 0], [0x06, 0, 0, 1], [0x06, 0, 0, 2]], &[], 1),
    ("jgt x",     &[[0x00, 0, 0, 7], [0x01, 0, 0, 6], [0x2d, 0, 1, 0], [0x06, 0, 0, 1], [0x06, 0, 0, 2]], &[], 1),
    ("same side", &[[0x15, 1, 1, 0], [0x06, 0, 0, 1], [0x06, 0, 0, 2]], &[], 2),
];

#[test]
fn classic() {
    for (name, statements, message, result) in CLASSIC {
        let mut raw = Vec::new();
        let mut text = format!("{}\n", statements.len());
        for &[code, jt, jf, k] in *statements {
            raw.extend((code as u16).to_le_bytes());
            raw.extend([jt as u8, jf as u8]);
            raw.extend(k.to_le_bytes());
            text += &format!("{code} {jt} {jf} {k}\n");
        }
        for bytes in [raw, text.into_bytes()] {
            let program = Program::load(&bytes, &LoadOptions::default()).expect(name);
            assert!(program.stats().classic, "{name}");
            let value = program.run(message, &mut Context::new(), &mut FUEL.clone());
            assert_eq!(value.map(i32::cast_unsigned), Ok(*result), "{name}");
        }
    }
}

#[test]
fn formats_are_distinguished() {
    let raw_ebpf = bytes(&[mov(0, 3), jeq(0, 3, 0), EXIT]);
    let program = Program::load(&raw_ebpf, &LoadOptions::default()).expect("eBPF");
    assert!(!program.stats().classic);
    let classic = [0x06, 0, 0, 0, 5, 0, 0, 0];
    let program = Program::load(&classic, &LoadOptions::default()).expect("classic");
    assert!(program.stats().classic);
    let forced = LoadOptions { format: Format::Raw, name: None };
    assert!(Program::load(&classic, &forced).is_err(), "no exit: as eBPF it is refused");
}
