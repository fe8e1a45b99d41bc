//! A second, simple interpreter, compared over random programs of arithmetic and forward jumps.
//!
//! It computes with 128-bit and decimal-like means (remainders, powers of two) where the crate uses machine
//! instructions, so that the two share no mistake.

use crate::asm::{self, CB, DW, EXIT, add_reg, copy, load_imm, mov, program, raw, store};
use proptest::prelude::*;
use towpath_bpf::{Context, Insn};

const TWO_32: i128 = 1 << 32;
const TWO_64: i128 = 1 << 64;

/// The number from 0 to `modulus` - 1 with the same low bits.
fn unsigned(value: i128, modulus: i128) -> i128 {
    value.rem_euclid(modulus)
}

/// The number from -`modulus`/2 to `modulus`/2 - 1 with the same low bits.
fn signed(value: i128, modulus: i128) -> i128 {
    let value = unsigned(value, modulus);
    if value >= modulus / 2 { value - modulus } else { value }
}

/// Arithmetic, RFC 9669 table by table.
fn alu(insn: Insn, dst: i128, src: i128) -> i128 {
    let modulus = if insn.code & 7 == 7 { TWO_64 } else { TWO_32 };
    let bits = if modulus == TWO_64 { 64 } else { 32 };
    let (a, b) = (unsigned(dst, modulus), unsigned(src, modulus));
    let (sa, sb) = (signed(dst, modulus), signed(src, modulus));
    let power = 1_i128 << unsigned(b, bits);
    let bitwise = |rule: fn(bool, bool) -> bool| {
        (0..bits).filter(|bit| rule(a >> bit & 1 == 1, b >> bit & 1 == 1)).map(|bit| 1 << bit).sum::<i128>()
    };
    let result = match (insn.code >> 4, insn.off) {
        (0x0, _) => a + b,
        (0x1, _) => a - b,
        // Only the low bits of the product matter, so the halves are multiplied separately.
        (0x2, _) => a * unsigned(b, TWO_32) + unsigned(a * (b / TWO_32), TWO_32) * TWO_32,
        (0x3, 0) => {
            if b == 0 {
                0
            } else {
                a / b
            }
        }
        (0x3, _) => {
            if sb == 0 {
                0
            } else {
                sa / sb
            }
        }
        (0x4, _) => bitwise(|a, b| a || b),
        (0x5, _) => bitwise(|a, b| a && b),
        (0x6, _) => unsigned(a, modulus / power) * power,
        (0x7, _) => a / power,
        (0x8, _) => -a,
        (0x9, 0) => {
            if b == 0 {
                a
            } else {
                a % b
            }
        }
        (0x9, _) => {
            if sb == 0 {
                a
            } else {
                sa % sb
            }
        }
        (0xa, _) => bitwise(|a, b| a != b),
        (0xb, 0) => b,
        (0xb, bits) => signed(b, 1 << bits),
        (0xc, _) => sa.div_euclid(power),
        (0xd, _) => {
            let bytes = insn.imm / 8;
            let little: Vec<i128> = (0..bytes).map(|byte| dst >> (8 * byte) & 0xff).collect();
            let swapped = insn.code != 0xd4;
            let place = |byte: i32| if swapped { bytes - 1 - byte } else { byte };
            return (0..bytes).map(|byte| little[place(byte) as usize] << (8 * byte)).sum();
        }
        _ => unreachable!("not generated"),
    };
    unsigned(result, modulus)
}

fn holds(insn: Insn, dst: i128, src: i128) -> bool {
    let modulus = if insn.code & 7 == 5 { TWO_64 } else { TWO_32 };
    let (a, b) = (unsigned(dst, modulus), unsigned(src, modulus));
    let (sa, sb) = (signed(dst, modulus), signed(src, modulus));
    match insn.code >> 4 {
        0x1 => a == b,
        0x2 => a > b,
        0x3 => a >= b,
        0x4 => (0..64).any(|bit| a >> bit & 1 == 1 && b >> bit & 1 == 1),
        0x5 => a != b,
        0x6 => sa > sb,
        0x7 => sa >= sb,
        0xa => a < b,
        0xb => a <= b,
        0xc => sa < sb,
        _ => sa <= sb,
    }
}

/// Runs instructions on r0 to r8.
fn model(code: &[Insn], regs: &mut [i128; 9]) {
    let mut at = 0;
    while let Some(&insn) = code.get(at) {
        at += 1;
        let dst = regs[usize::from(insn.dst)];
        let src =
            if insn.code & 8 != 0 { regs[usize::from(insn.src)] } else { unsigned(insn.imm.into(), TWO_64) };
        match insn.code & 7 {
            4 | 7 => regs[usize::from(insn.dst)] = alu(insn, dst, src),
            _ if insn.code == 0x05 || holds(insn, dst, src) => {
                at += usize::try_from(insn.off).expect("forward")
            }
            _ => {}
        }
    }
}

fn number() -> impl Strategy<Value = u64> {
    (any::<u64>(), 0..64_u32, -2..=2_i64, any::<bool>()).prop_map(|(random, shift, near, edge)| {
        if edge { (1_u64 << shift).wrapping_add_signed(near) } else { random >> shift }
    })
}

/// An instruction on r0 to r8 that is valid at every position; jumps are limited to the program later.
fn insn() -> impl Strategy<Value = Insn> {
    let fields = (0..9_u8, 0..9_u8, any::<bool>(), any::<bool>());
    let imm = prop_oneof![any::<i32>(), -2..70_i32];
    (0..28_u8, fields, imm, 0..5_i16, 0..3_i16).prop_map(
        |(pick, (dst, src, wide, register), imm, off, third)| {
            let class = if wide { 7 } else { 4 };
            let bits = if wide { 64 } else { 32 };
            let two = |op: u8, off: i16, imm: i32| {
                if register {
                    raw(class | 8 | op, dst, src, off, 0)
                } else {
                    raw(class | op, dst, 0, off, imm)
                }
            };
            let not_zero = if imm == 0 { 3 } else { imm };
            match pick {
                0..=2 => two(pick << 4, 0, imm),
                3 => two(0x30, 0, not_zero),
                4 => two(0x30, 1, not_zero),
                5 => two(0x40, 0, imm),
                6 => two(0x50, 0, imm),
                7 => two(0x60, 0, imm.rem_euclid(bits)),
                8 => two(0x70, 0, imm.rem_euclid(bits)),
                9 => raw(class | 0x80, dst, 0, 0, 0),
                10 => two(0x90, 0, not_zero),
                11 => two(0x90, 1, not_zero),
                12 => two(0xa0, 0, imm),
                13 => two(0xb0, 0, imm),
                14 => two(0xc0, 0, imm.rem_euclid(bits)),
                15 => raw(class | 0xb8, dst, src, if wide { 8 << third } else { 8 << (third % 2) }, 0),
                16 => raw([0xd4, 0xdc, 0xd7][usize::from(src % 3)], dst, 0, 0, 16 << third),
                17 => raw(0x05, 0, 0, off, 0),
                _ => {
                    let op =
                        [0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0xa0, 0xb0, 0xc0][usize::from(pick - 18)];
                    let class = if wide { 5 } else { 6 };
                    if register {
                        raw(class | 8 | op, dst, src, off, 0)
                    } else {
                        raw(class | op, dst, 0, off, imm)
                    }
                }
            }
        },
    )
}

fn is_jump(insn: Insn) -> bool {
    matches!(insn.code & 7, 5 | 6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn the_model_agrees(start in proptest::array::uniform9(number()), body in proptest::collection::vec(insn(), 1..40)) {
        let length = body.len();
        let body: Vec<Insn> = body.into_iter().enumerate().map(|(at, insn)| {
            let room = i16::try_from(length - at - 1).expect("short");
            if is_jump(insn) { Insn { off: insn.off.min(room), ..insn } } else { insn }
        }).collect();
        // r9 has the context. The result depends on every register.
        let mut code = vec![copy(9, 1)];
        for (register, value) in start.iter().enumerate() {
            code.extend(load_imm(register as u8, *value));
        }
        code.extend(&body);
        for register in 1..9 {
            code.extend([raw(0x27, 0, 0, 0, 0x0100_0193), add_reg(0, register)]);
        }
        code.extend([store(DW, 9, CB, 0), mov(0, 0), EXIT]);

        let mut context = Context::new();
        let result = program(&code).run(&[], &mut context, &mut 1000);
        prop_assert_eq!(result, Ok(0));

        let mut regs = start.map(i128::from);
        model(&body, &mut regs);
        let fold = regs[1..].iter().fold(regs[0], |sum, value| unsigned(sum * 0x0100_0193 + value, TWO_64));
        let value = i128::from(context.cb[0]) | i128::from(context.cb[1]) << 32;
        prop_assert_eq!(value, fold, "{}", asm::listing(&code));
    }
}
