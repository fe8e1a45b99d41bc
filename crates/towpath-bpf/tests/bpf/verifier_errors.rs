//! Rejected programs, one per row, with the complete error message.

use crate::asm::{
    self, B, CB, DATA, DATA_END, DW, EXIT, H, HASH, LEN, MARK, W, add, add_reg, call, copy, helper, ja, jgt,
    load, load_raw, mov, raw, store, store_imm,
};
use towpath_bpf::{Format, Insn, LoadOptions, MAX_INSTRUCTIONS, Program};

#[rustfmt::skip]
const EBPF: &[(&[Insn], &str)] = &[
    // Valid instructions.
    (&[raw(0x8f, 0, 0, 0, 0), EXIT], "instruction 0: opcode 0x8f is no instruction that a framing program may use"),
    (&[raw(0xe5, 0, 0, 0, 0), EXIT], "instruction 0: opcode 0xe5 is no instruction that a framing program may use"),
    (&[raw(0x38, 0, 0, 0, 0), EXIT], "instruction 0: opcode 0x38 is no instruction that a framing program may use"),
    (&[raw(0xb7, 11, 0, 0, 0), EXIT], "instruction 0: r11 does not exist; the registers are r0 to r10"),
    (&[raw(0xbf, 0, 12, 0, 0), EXIT], "instruction 0: r12 does not exist; the registers are r0 to r10"),
    (&[raw(0xb7, 0, 1, 0, 0), EXIT], "instruction 0: a field that this instruction does not use is not zero"),
    (&[raw(0x95, 0, 0, 1, 0)], "instruction 0: a field that this instruction does not use is not zero"),
    (&[raw(0xd4, 0, 0, 0, 24), EXIT], "instruction 0: a field that this instruction does not use is not zero"),
    (&[raw(0x18, 0, 0, 0, 0)], "instruction 0: the second half of this 64-bit load is missing"),
    (&[raw(0x18, 0, 0, 0, 5), raw(0, 0, 0, 0, 0), raw(0x05, 0, 0, -2, 0), EXIT],
        "instruction 2 (goto 1): the jump to instruction 1 lands inside a 64-bit load"),
    (&[mov(10, 0), EXIT], "instruction 0: r10, the frame pointer, cannot be written"),
    (&[mov(0, 0), raw(0x37, 0, 0, 0, 0), EXIT], "instruction 1: division by the constant 0"),
    (&[mov(0, 0), raw(0x97, 0, 0, 0, 0), EXIT], "instruction 1: division by the constant 0"),
    (&[mov(0, 0), raw(0x67, 0, 0, 0, 64), EXIT], "instruction 1: a shift by 64 is not below the register's width"),
    (&[mov(0, 0), raw(0x64, 0, 0, 0, 32), EXIT], "instruction 1: a shift by 32 is not below the register's width"),
    (&[mov(0, 0), raw(0xdb, 10, 0, -8, 0), EXIT],
        "instruction 1: atomic instructions are refused: nothing that a framing program writes is shared"),
    (&[raw(0x18, 1, 1, 0, 5), raw(0, 0, 0, 0, 0), EXIT],
        "instruction 0: it uses a BPF map, and a framing program has none; its state is cb[0] to cb[4]"),
    (&[raw(0x18, 1, 2, 0, 5), raw(0, 0, 0, 0, 0), EXIT],
        "instruction 0: it uses a map's value or a global variable; \
         a framing program has only its stack and cb[0] to cb[4]"),
    (&[raw(0x18, 1, 4, 0, 0), raw(0, 0, 0, 0, 0), EXIT],
        "instruction 0: it takes the address of a function; only direct calls are accepted"),
    (&[raw(0x18, 1, 3, 0, 0), raw(0, 0, 0, 0, 0), EXIT],
        "instruction 0: it loads an address that only a kernel could fill in"),
    (&[helper(1), EXIT], "instruction 0: helper 1 is not available; the only one is 26, skb_load_bytes"),
    (&[raw(0x85, 0, 2, 0, 7), EXIT],
        "instruction 0: it calls a kernel function; the only call outside the program is helper 26, skb_load_bytes"),
    (&[raw(0x8d, 0, 0, 0, 1), EXIT],
        "instruction 0: a call through a register is refused; only direct calls are accepted"),

    // Control flow.
    (&[mov(0, 0)],
        "instruction 0 (r0 = 0): the program can run past its last instruction; end every path with an exit"),
    (&[mov(0, 0), raw(0x15, 0, 0, 0, 0)],
        "instruction 1 (if r0 == 0 goto 2): the jump to instruction 2 leaves the function"),
    (&[ja(5), EXIT], "instruction 0 (goto 6): the jump to instruction 6 leaves the function"),
    (&[mov(0, 0), ja(-3), EXIT], "instruction 1 (goto -1): the jump to instruction -1 leaves the function"),
    (&[ja(1), raw(0x18, 0, 0, 0, 0), raw(0, 0, 0, 0, 0), EXIT],
        "instruction 0 (goto 2): the jump to instruction 2 lands inside a 64-bit load"),
    (&[call(7), EXIT], "instruction 0 (call 8): the call to instruction 8 leaves the program"),
    (&[mov(0, 0), raw(0x15, 0, 0, 2, 0), call(1), EXIT, mov(0, 0), EXIT],
        "instruction 1 (if r0 == 0 goto 4): the jump to instruction 4 leaves the function"),
    (&[call(-1), EXIT],
        "instruction 0 (call 0): calls are nested deeper than 8 functions, or recurse"),

    // Contents of registers.
    (&[EXIT], "instruction 0 (exit): r0 is read, but a path to here does not set it"),
    (&[copy(0, 3), EXIT], "instruction 0 (r0 = r3): r3 is read, but a path to here does not set it"),
    (&[load(W, 2, 1, LEN), raw(0x15, 2, 0, 1, 0), mov(0, 1), EXIT],
        "instruction 3 (exit): r0 is read, but a path to here does not set it"),
    (&[copy(7, 1), call(2), load(W, 0, 1, LEN), EXIT, mov(0, 0), EXIT],
        "instruction 2 (r0 = *(u32 *)(r1 + 0)): r1 is read after a call, which leaves nothing in r1 to r5"),
    (&[mov(6, 1), call(1), EXIT, copy(0, 6), EXIT],
        "instruction 3 (r0 = r6): r6 is read, but a path to here does not set it"),
    (&[mov(2, 64), load(W, 0, 2, 0), EXIT],
        "instruction 1 (r0 = *(u32 *)(r2 + 0)): r2 is a number, not a pointer, and cannot be dereferenced"),
    (&[raw(0x07, 1, 0, 0, 4), raw(0x0f, 1, 1, 0, 0), EXIT],
        "instruction 1 (r1 += r1): r1 is a pointer to the context; \
         only additions and subtractions of numbers, in 64 bits, keep it a pointer"),
    (&[copy(2, 10), raw(0x57, 2, 0, 0, -8), EXIT],
        "instruction 1 (r2 &= -8): r2 is a pointer to the stack; \
         only additions and subtractions of numbers, in 64 bits, keep it a pointer"),
    (&[load(W, 2, 1, DATA), raw(0x04, 2, 0, 0, 4), EXIT],
        "instruction 1 (w2 += 4): r2 is a pointer into the message; \
         only additions and subtractions of numbers, in 64 bits, keep it a pointer"),
    (&[load(W, 2, 1, DATA_END), add(2, -1), EXIT],
        "instruction 1 (r2 += -1): r2 is data_end; it can be compared with, and subtracted from, but not moved"),
    (&[load(W, 2, 1, DATA), raw(0xbc, 0, 2, 0, 0), EXIT],
        "instruction 1 (w0 = w2): r2 is a pointer into the message, and a number is needed here"),
    (&[load(W, 2, 1, DATA), raw(0x18, 3, 0, 0, i32::MAX), raw(0, 0, 0, 0, 0), add_reg(2, 3), EXIT],
        "instruction 3 (r2 += r3): r2 is moved too far from where it points to"),
    (&[mov(0, 0), raw(0x15, 1, 0, 0, 5), EXIT],
        "instruction 1 (if r1 == 5 goto 2): r1 is a pointer to the context and is compared with something else"),
    (&[mov(0, 0), raw(0x1e, 10, 10, 0, 0), EXIT],
        "instruction 1 (if w10 == w10 goto 2): r10 is a pointer to the stack and is compared with something else"),
    (&[copy(0, 1), EXIT], "instruction 1 (exit): r0 is a pointer to the context; a program returns a number"),
    (&[call(1), EXIT, copy(0, 10), EXIT],
        "instruction 3 (exit): r0 is a pointer to the stack; a program returns a number"),

    // Memory accesses.
    (&[load(W, 0, 1, 16), EXIT],
        "instruction 0 (r0 = *(u32 *)(r1 + 16)): offset 16 of the context is `protocol`, which a message does not \
         have; there are len, mark, cb, hash, data and data_end"),
    (&[load(DW, 0, 1, LEN), EXIT],
        "instruction 0 (r0 = *(u64 *)(r1 + 0)): 8 bytes at offset 0 of the context are no field"),
    (&[load(W, 0, 1, 2), EXIT],
        "instruction 0 (r0 = *(u32 *)(r1 + 2)): 4 bytes at offset 2 of the context are no field"),
    (&[load(H, 0, 1, DATA), EXIT],
        "instruction 0 (r0 = *(u16 *)(r1 + 76)): 2 bytes at offset 76 of the context are no field"),
    (&[load(W, 0, 1, -4), EXIT],
        "instruction 0 (r0 = *(u32 *)(r1 - 4)): 4 bytes at offset -4 of the context are no field"),
    (&[load(DW, 0, 1, CB + 16), EXIT],
        "instruction 0 (r0 = *(u64 *)(r1 + 64)): 8 bytes at offset 64 of the context are no field"),
    (&[load(W, 0, 1, 300), EXIT],
        "instruction 0 (r0 = *(u32 *)(r1 + 300)): 4 bytes at offset 300 of the context are no field"),
    (&[raw(0x81, 0, 1, 0, 0), EXIT],
        "instruction 0 (r0 = *(s32 *)(r1 + 0)): sign-extending loads from the context are refused"),
    (&[store_imm(W, 1, LEN, 0), EXIT],
        "instruction 0 (*(u32 *)(r1 + 0) = 0): `len` of the context cannot be written; cb, mark and hash can"),
    (&[store_imm(W, 1, DATA_END, 0), EXIT],
        "instruction 0 (*(u32 *)(r1 + 80) = 0): `data_end` of the context cannot be written; cb, mark and hash can"),
    (&[store_imm(B, 1, MARK, 0), EXIT],
        "instruction 0 (*(u8 *)(r1 + 8) = 0): 1 bytes at offset 8 of the context are no field"),
    (&[store(W, 1, HASH, 1), EXIT],
        "instruction 0 (*(u32 *)(r1 + 68) = r1): r1 is a pointer to the context; \
         only numbers can be stored in the context"),
    (&[load(W, 2, 1, DATA), store_imm(B, 2, 0, 0), EXIT],
        "instruction 1 (*(u8 *)(r2 + 0) = 0): messages are read-only: r2 points into one"),
    (&[load(W, 2, 1, DATA_END), load(B, 0, 2, 0), EXIT],
        "instruction 1 (r0 = *(u8 *)(r2 + 0)): r2 is data_end, the first byte after the message"),
    (&[load(W, 2, 1, DATA), load(B, 0, 2, 0), EXIT],
        "instruction 1 (r0 = *(u8 *)(r2 + 0)): offsets 0 to 0 from r2's base are read, but only 0 bytes are known to be \
         there; compare the pointer with data_end first"),
    (&[load(W, 2, 1, DATA), load(W, 3, 1, DATA_END), copy(4, 2), add(4, 4), mov(0, 0), jgt(4, 3, 1),
       load(W, 0, 2, 1), EXIT],
        "instruction 6 (r0 = *(u32 *)(r2 + 1)): offsets 1 to 4 from r2's base are read, but only 4 bytes are known to be \
         there; compare the pointer with data_end first"),
    (&[load(W, 2, 1, DATA), load(W, 3, 1, DATA_END), copy(4, 2), add(4, 4), mov(0, 0), jgt(3, 4, 1),
       load(B, 0, 2, 0), EXIT],
        "instruction 6 (r0 = *(u8 *)(r2 + 0)): offsets 0 to 0 from r2's base are read, but only 0 bytes are known to be \
         there; compare the pointer with data_end first"),
    (&[load(W, 2, 1, DATA), load(W, 3, 1, DATA_END), mov(0, 0), jgt(2, 3, 1), load(B, 0, 2, -1), EXIT],
        "instruction 4 (r0 = *(u8 *)(r2 - 1)): offsets -1 to -1 from r2's base are read, but only 0 bytes are known to be \
         there; compare the pointer with data_end first"),
    (&[load(W, 2, 1, DATA), load(W, 3, 1, CB), add_reg(2, 3), load(B, 0, 2, 0), EXIT],
        "instruction 3 (r0 = *(u8 *)(r2 + 0)): offsets 0 to 0 from r2's base are read, but only 0 bytes are known to be \
         there; compare the pointer with data_end first"),
    (&[load(W, 2, 1, DATA), load(W, 3, 1, DATA_END), mov(0, 0), raw(0x3d, 2, 3, 1, 0), load(H, 0, 2, 0), EXIT],
        "instruction 4 (r0 = *(u16 *)(r2 + 0)): offsets 0 to 1 from r2's base are read, but only 1 bytes are known to be \
         there; compare the pointer with data_end first"),
    (&[load(W, 2, 1, DATA), load(W, 3, 1, DATA_END), mov(0, 0), raw(0xbd, 3, 2, 1, 0), load(H, 0, 2, 0), EXIT],
        "instruction 4 (r0 = *(u16 *)(r2 + 0)): offsets 0 to 1 from r2's base are read, but only 1 bytes are known to be \
         there; compare the pointer with data_end first"),
    // Two paths join. Only one of them has compared the pointer, set the register, or written the stack.
    (&[load(W, 5, 1, CB), load(W, 2, 1, DATA), load(W, 3, 1, DATA_END), copy(4, 2), add(4, 1), mov(0, 0),
       raw(0x45, 5, 0, 1, 1), jgt(4, 3, 1), load(B, 0, 2, 0), EXIT],
        "instruction 8 (r0 = *(u8 *)(r2 + 0)): offsets 0 to 0 from r2's base are read, but only 0 bytes are known to be \
         there; compare the pointer with data_end first"),
    (&[load(W, 5, 1, LEN), raw(0x45, 5, 0, 1, 1), mov(0, 0), EXIT],
        "instruction 3 (exit): r0 is read, but a path to here does not set it"),
    (&[load(W, 5, 1, LEN), raw(0x45, 5, 0, 1, 1), store_imm(W, 10, -8, 0), load(B, 0, 10, -5), EXIT],
        "instruction 3 (r0 = *(u8 *)(r10 - 5)): byte -5 of the stack is read, but a path to here does not write it"),
    // One of eight bytes is written, at an unknown offset: none of them counts as written.
    (&[load(W, 4, 1, CB), raw(0x57, 4, 0, 0, 7), copy(3, 10), add(3, -8), add_reg(3, 4), store_imm(B, 3, 0, 0),
       load(B, 0, 10, -8), EXIT],
        "instruction 6 (r0 = *(u8 *)(r10 - 8)): byte -8 of the stack is read, but a path to here does not write it"),
    (&[store_imm(DW, 10, 0, 0), EXIT],
        "instruction 0 (*(u64 *)(r10 + 0) = 0): bytes 0 to 7 of the stack are outside the frame, which is -512 to -1"),
    (&[store_imm(B, 10, -513, 0), EXIT],
        "instruction 0 (*(u8 *)(r10 - 513) = 0): \
         bytes -513 to -513 of the stack are outside the frame, which is -512 to -1"),
    (&[load(DW, 0, 10, -8), EXIT],
        "instruction 0 (r0 = *(u64 *)(r10 - 8)): byte -8 of the stack is read, but a path to here does not write it"),
    (&[store_imm(W, 10, -8, 0), load(DW, 0, 10, -8), EXIT],
        "instruction 1 (r0 = *(u64 *)(r10 - 8)): byte -4 of the stack is read, but a path to here does not write it"),
    (&[load(W, 2, 1, CB), copy(3, 10), add_reg(3, 2), EXIT],
        "instruction 2 (r3 += r2): r3 points to the stack, and the number added to it has no small bound; \
         mask or compare it first"),
    (&[store(DW, 10, -8, 1), load(W, 0, 10, -8), EXIT],
        "instruction 1 (r0 = *(u32 *)(r10 - 8)): a pointer saved on the stack is read in part, at byte -8"),
    (&[store(W, 10, -8, 1), EXIT],
        "instruction 0 (*(u32 *)(r10 - 8) = r1): r1 is a pointer to the context, and a number is needed here"),
    (&[copy(2, 1), load(W, 3, 1, LEN), raw(0x15, 3, 0, 2, 0), copy(2, 10), store_imm(DW, 2, -48, 0), mov(0, 0),
       store_imm(W, 2, -48, 1), EXIT],
        "instruction 6 (*(u32 *)(r2 - 48) = 1): 4 bytes at offset -48 of the context are no field"),
    (&[copy(2, 1), load(W, 3, 1, LEN), mov(0, 0), raw(0x15, 3, 0, 3, 0), copy(2, 10), add(2, -64), ja(0),
       store_imm(W, 2, CB, 1), EXIT],
        "instruction 7 (*(u32 *)(r2 + 48) = 1): r2 points to the stack on one path and to a field of the context on \
         another; use one instruction for each"),

    // Instructions with special rules.
    (&[raw(0x20, 0, 0, 0, 0), EXIT],
        "instruction 0 (r0 = *(u32 *)skb[0]): this load takes the context from r6, and r6 is not set"),
    (&[mov(6, 0), raw(0x20, 0, 0, 0, 0), EXIT],
        "instruction 1 (r0 = *(u32 *)skb[0]): this load takes the context from r6, and r6 is a number"),
    (&[copy(6, 1), raw(0x20, 0, 0, 0, -4096), EXIT],
        "instruction 1 (r0 = *(u32 *)skb[-4096]): negative offset -4096: \
         a message has no ancillary data and no link or network header"),
    (&[copy(6, 1), raw(0x20, 0, 0, 0, 0), copy(0, 1), EXIT],
        "instruction 2 (r0 = r1): r1 is read after a call, which leaves nothing in r1 to r5"),
    (&[call(1), EXIT, copy(6, 1), raw(0x20, 0, 0, 0, 0), EXIT],
        "instruction 3 (r0 = *(u32 *)skb[0]): this load ends the program when it is out of range; \
         in a called function use skb_load_bytes"),
    (&[mov(1, 0), helper(26), EXIT],
        "instruction 1 (call skb_load_bytes): r1 is a number; skb_load_bytes takes the context there"),
    (&[mov(2, 0), load(W, 3, 1, DATA), mov(4, 4), helper(26), EXIT],
        "instruction 3 (call skb_load_bytes): r3 is a pointer into the message; skb_load_bytes writes to the stack only"),
    (&[mov(2, 0), copy(3, 10), add(3, -8), mov(4, 0), helper(26), EXIT],
        "instruction 4 (call skb_load_bytes): r4, the length for skb_load_bytes, may be 0; it must be 1 to 512"),
    (&[mov(2, 0), copy(3, 10), add(3, -8), load(W, 4, 1, CB), add(4, 1), helper(26), EXIT],
        "instruction 5 (call skb_load_bytes): r4, the length for skb_load_bytes, may be 0; it must be 1 to 512"),
    (&[mov(2, 0), copy(3, 10), add(3, -8), mov(4, 513), helper(26), EXIT],
        "instruction 4 (call skb_load_bytes): r4, the length for skb_load_bytes, may be 513; it must be 1 to 512"),
    (&[mov(2, 0), copy(3, 10), add(3, -8), mov(4, 9), helper(26), EXIT],
        "instruction 4 (call skb_load_bytes): bytes -8 to 0 of the stack are outside the frame, which is -512 to -1"),
    (&[mov(2, 0), copy(3, 10), add(3, -8), load(W, 4, 1, CB), raw(0x57, 4, 0, 0, 7), add(4, 1), helper(26), EXIT],
        "instruction 6 (call skb_load_bytes): byte -8 of the stack is read, but a path to here does not write it"),
];

#[test]
fn ebpf() {
    for (code, message) in EBPF {
        match load_raw(code) {
            Ok(_) => panic!("accepted, and should be refused: {message}\n{}", asm::listing(code)),
            Err(error) => assert_eq!(error.to_string(), *message, "\n{}", asm::listing(code)),
        }
    }
}

#[rustfmt::skip]
const CLASSIC: &[(&[[u32; 4]], &str)] = &[
    (&[[0x99, 0, 0, 0]], "instruction 0: opcode 0x0099 is no instruction of classic BPF"),
    (&[[0x0106, 0, 0, 0]], "instruction 0: opcode 0x0106 is no instruction of classic BPF"),
    (&[[0x00, 0, 0, 1]], "instruction 0 (ld #0x1): the program can run past its last instruction; end every path with an exit"),
    (&[[0x15, 0, 1, 0], [0x06, 0, 0, 0]], "instruction 0 (jeq #0x0, 1, 2): the jump to instruction 2 leaves the function"),
    (&[[0x05, 0, 0, u32::MAX], [0x06, 0, 0, 0]],
        "instruction 0 (jmp 4294967296): the jump to instruction 4294967296 leaves the function"),
    (&[[0x60, 0, 0, 3], [0x16, 0, 0, 0]], "instruction 0 (ld M[3]): M[3] is read, but a path to here does not write it"),
    (&[[0x15, 1, 0, 0], [0x02, 0, 0, 3], [0x60, 0, 0, 3], [0x16, 0, 0, 0]],
        "instruction 2 (ld M[3]): M[3] is read, but a path to here does not write it"),
    (&[[0x02, 0, 0, 16], [0x16, 0, 0, 0]], "instruction 0: M[16] does not exist; scratch memory is M[0] to M[15]"),
    (&[[0x34, 0, 0, 0], [0x16, 0, 0, 0]], "instruction 0: division by the constant 0"),
    (&[[0x64, 0, 0, 32], [0x16, 0, 0, 0]], "instruction 0: a shift by 32 is not below the register's width"),
    (&[[0x20, 0, 0, 0xffff_f000], [0x16, 0, 0, 0]],
        "instruction 0: negative offset -4096: a message has no ancillary data and no link or network header"),
];

#[test]
fn classic() {
    for (statements, message) in CLASSIC {
        let mut raw = Vec::new();
        for &[code, jt, jf, k] in *statements {
            raw.extend((code as u16).to_le_bytes());
            raw.extend([jt as u8, jf as u8]);
            raw.extend(k.to_le_bytes());
        }
        let options = LoadOptions { format: Format::Classic, name: None };
        let error = Program::load(&raw, &options).expect_err(message);
        assert_eq!(error.to_string(), *message);
    }
}

#[rustfmt::skip]
const BYTES: &[(&[u8], &str)] = &[
    (b"", "the program is empty"),
    (b"\n \n", "the program is empty"),
    (b"\x95", "1 bytes are no whole number of eight-byte instructions, no ELF object and no `tcpdump -ddd` text"),
    (b"1\n6 0 0\n", "line 2: `6 0 0` is not `code jt jf k` in decimal numbers"),
    (b"1\n6 256 0 0\n", "line 2: `6 256 0 0` is not `code jt jf k` in decimal numbers"),
    (b"1\n6 0 0 0 0\n", "line 2: `6 0 0 0 0` is not `code jt jf k` in decimal numbers"),
    (b"2\n6 0 0 0\n", "line 1: 2 instructions are announced, 1 follow"),
    (b"1\n6 0 0 0\n6 0 0 0\n", "line 3: more than the 1 instructions of line 1"),
    (b"5000\n6 0 0 0\n", "line 1: 5000 instructions; a program has at most 4096"),
    (b"1 2\n6 0 0 0\n", "line 1: `1 2` is not the number of instructions"),
    (b"\x7fELF", "the object is not for BPF; compile it with `clang -O2 -target bpf -c`"),
    (b"\x7fELF\x02\x01\x01", "damaged ELF object: Invalid ELF header size or alignment"),
    (b"\x7fELF\x02\x02\x01\0\0\0\0\0\0\0\0\0\0\x01\0\xf7",
        "the object is for big-endian BPF; compile it with `clang -O2 -target bpfel -c`"),
];

#[test]
fn bytes_that_are_no_program() {
    for (bytes, message) in BYTES {
        let error = Program::load(bytes, &LoadOptions::default()).expect_err(message);
        assert_eq!(error.to_string(), *message);
    }
    let options = LoadOptions { name: Some("frame".to_owned()), ..LoadOptions::default() };
    let error = Program::load(b"1\n6 0 0 0\n", &options).expect_err("a name");
    assert_eq!(error.to_string(), "only ELF objects have programs with names, so `frame` cannot be chosen");
}

#[test]
fn long_programs_and_many_paths_end() {
    let mut long = vec![mov(0, 0); MAX_INSTRUCTIONS];
    long.push(EXIT);
    let error = load_raw(&long).expect_err("too long").to_string();
    assert_eq!(error, "instruction 32768 (exit): 32769 instructions; a program has at most 32768");

    // Every branch doubles the number of states, which differ in r0. They are joined, and the program is accepted.
    let mut wide = vec![load(W, 2, 1, LEN), mov(0, 0)];
    for bit in 0..24 {
        wide.extend([raw(0x45, 2, 0, 1, 1 << bit), add(0, 1 << bit)]);
    }
    wide.push(EXIT);
    let program = load_raw(&wide).expect("joined");
    assert!(program.stats().steps < 200_000, "{} steps", program.stats().steps);

    // A loop around two hundred branches: after many steps, more states are joined.
    let mut looping = vec![load(W, 9, 1, LEN), mov(0, 0), mov(8, 0)];
    for bit in 0..200 {
        looping.extend([raw(0x45, 9, 0, 1, 1 << (bit % 31)), add(0, 1 + bit % 7)]);
    }
    looping.extend([add(8, 1), raw(0x55, 8, 0, -402, 1000), EXIT]);
    let accepted = load_raw(&looping).map(|program| program.stats().back_edges);
    assert_eq!(accepted, Ok(1));

    // Functions that call twice, eight levels deep, with different states: the number of steps is bounded.
    let mut deep = Vec::new();
    for level in 0..7 {
        deep.extend([mov(6, level), call(3), mov(7, 1), call(1), EXIT]);
    }
    deep.extend([mov(0, 0), EXIT]);
    assert!(load_raw(&deep).is_ok_and(|program| program.stats().steps < 1_000_000));
}
