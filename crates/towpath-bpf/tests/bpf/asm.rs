//! Functions that encode instructions, for test programs.
#![allow(dead_code)] // Each test file uses its share.

use towpath_bpf::{Code, Format, Insn, LoadError, LoadOptions, Program};

/// Sizes, as the instruction has them.
pub(crate) const W: u8 = 0x00;
pub(crate) const H: u8 = 0x08;
pub(crate) const B: u8 = 0x10;
pub(crate) const DW: u8 = 0x18;

/// `struct __sk_buff`.
pub(crate) const LEN: i16 = 0;
pub(crate) const MARK: i16 = 8;
pub(crate) const CB: i16 = 48;
pub(crate) const HASH: i16 = 68;
pub(crate) const DATA: i16 = 76;
pub(crate) const DATA_END: i16 = 80;

pub(crate) const EXIT: Insn = raw(0x95, 0, 0, 0, 0);

pub(crate) const fn raw(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Insn {
    Insn { code, dst, src, off, imm }
}

pub(crate) const fn mov(dst: u8, imm: i32) -> Insn {
    raw(0xb7, dst, 0, 0, imm)
}

pub(crate) const fn copy(dst: u8, src: u8) -> Insn {
    raw(0xbf, dst, src, 0, 0)
}

pub(crate) const fn add(dst: u8, imm: i32) -> Insn {
    raw(0x07, dst, 0, 0, imm)
}

pub(crate) const fn add_reg(dst: u8, src: u8) -> Insn {
    raw(0x0f, dst, src, 0, 0)
}

pub(crate) const fn load(size: u8, dst: u8, base: u8, off: i16) -> Insn {
    raw(0x61 | size, dst, base, off, 0)
}

pub(crate) const fn store(size: u8, base: u8, off: i16, src: u8) -> Insn {
    raw(0x63 | size, base, src, off, 0)
}

pub(crate) const fn store_imm(size: u8, base: u8, off: i16, imm: i32) -> Insn {
    raw(0x62 | size, base, 0, off, imm)
}

/// `if dst > src goto +off`, unsigned.
pub(crate) const fn jgt(dst: u8, src: u8, off: i16) -> Insn {
    raw(0x2d, dst, src, off, 0)
}

/// `if dst == imm goto +off`.
pub(crate) const fn jeq(dst: u8, imm: i32, off: i16) -> Insn {
    raw(0x15, dst, 0, off, imm)
}

pub(crate) const fn ja(off: i16) -> Insn {
    raw(0x05, 0, 0, off, 0)
}

pub(crate) const fn call(by: i32) -> Insn {
    raw(0x85, 0, 1, 0, by)
}

pub(crate) const fn helper(id: i32) -> Insn {
    raw(0x85, 0, 0, 0, id)
}

/// A 64-bit immediate load.
pub(crate) const fn load_imm(dst: u8, value: u64) -> [Insn; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    let (low, high) = (i32::from_le_bytes([a, b, c, d]), i32::from_le_bytes([e, f, g, h]));
    [raw(0x18, dst, 0, 0, low), raw(0, 0, 0, 0, high)]
}

pub(crate) fn bytes(code: &[Insn]) -> Vec<u8> {
    code.iter().flat_map(|insn| insn.emit()).collect()
}

pub(crate) fn load_raw(code: &[Insn]) -> Result<Program, LoadError> {
    Program::load(&bytes(code), &LoadOptions { format: Format::Raw, name: None })
}

/// Loads a program that must be accepted.
pub(crate) fn program(code: &[Insn]) -> Program {
    load_raw(code).unwrap_or_else(|error| panic!("{error}\n{}", listing(code)))
}

pub(crate) fn listing(code: &[Insn]) -> String {
    let options = LoadOptions { format: Format::Raw, name: None };
    Code::load(&bytes(code), &options).map(|code| code.to_string()).unwrap_or_default()
}
