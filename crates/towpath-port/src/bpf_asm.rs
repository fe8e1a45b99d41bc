//! An assembler for the BPF programs of this crate: instructions, labels and forward jumps.
//!
//! References: Documentation/bpf/standardization/instruction-set.rst, linux/bpf.h.

use std::os::fd::{AsRawFd, BorrowedFd};

/// A register. R0 has the result of a call, R1 to R5 its arguments, R6 to R9 survive it, R10 is the frame pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reg {
    R0,
    R1,
    R2,
    R3,
    R4,
    // R5 is unused.
    R6 = 6,
    R7,
    R8,
    R9,
    R10,
}

/// The size of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Byte = 0x10,
    Half = 0x08,
    Word = 0x00,
    Double = 0x18,
}

/// A condition on an unsigned word and an immediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cond {
    Eq = 0x10,
    Greater = 0x20,
    NotEq = 0x50,
    Less = 0xa0,
}

/// A place in the code, bound once, to which jumps lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Label(usize);

/// Code under construction.
#[derive(Debug, Default)]
pub(crate) struct Asm {
    code: Vec<[u8; 8]>,
    /// The position of each label.
    labels: Vec<Option<usize>>,
    /// Jumps: their positions and labels.
    jumps: Vec<(usize, Label)>,
}

impl Asm {
    /// A new label.
    pub(crate) fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Returns true if a jump leads to the label.
    pub(crate) fn is_used(&self, label: Label) -> bool {
        self.jumps.iter().any(|(_, to)| *to == label)
    }

    /// Binds a label to the next instruction.
    pub(crate) fn bind(&mut self, label: Label) {
        self.labels[label.0] = Some(self.code.len());
    }

    fn emit(&mut self, code: u8, (to, from): (Reg, Reg), offset: i16, immediate: i32) {
        let ([a, b], [c, d, e, f]) = (offset.to_ne_bytes(), immediate.to_ne_bytes());
        // The two registers share a byte; the low bits have the destination on little-endian machines.
        let (low, high) = if cfg!(target_endian = "little") { (to, from) } else { (from, to) };
        self.code.push([code, low as u8 | (high as u8) << 4, a, b, c, d, e, f]);
    }

    /// `to = from`.
    pub(crate) fn copy(&mut self, to: Reg, from: Reg) {
        self.emit(0xbf, (to, from), 0, 0);
    }

    /// `to = value`, sign-extended.
    pub(crate) fn set(&mut self, to: Reg, value: i32) {
        self.emit(0xb7, (to, Reg::R0), 0, value);
    }

    /// `to += value`.
    pub(crate) fn add(&mut self, to: Reg, value: i32) {
        self.emit(0x07, (to, Reg::R0), 0, value);
    }

    /// The word `to &= mask`.
    pub(crate) fn and(&mut self, to: Reg, mask: u32) {
        self.emit(0x54, (to, Reg::R0), 0, mask.cast_signed());
    }

    /// The word `to <<= bits`.
    pub(crate) fn shift_left(&mut self, to: Reg, bits: i32) {
        self.emit(0x64, (to, Reg::R0), 0, bits);
    }

    /// Converts the low half of `to` from network byte order (BPF_END, BPF_TO_BE).
    pub(crate) fn network_to_host(&mut self, to: Reg) {
        self.emit(0xdc, (to, Reg::R0), 0, 16);
    }

    /// `to -= from`.
    pub(crate) fn subtract(&mut self, to: Reg, from: Reg) {
        self.emit(0x1f, (to, from), 0, 0);
    }

    /// `to` = the address of the first value of the array `map` (BPF_PSEUDO_MAP_VALUE, Linux 5.2).
    pub(crate) fn map_value(&mut self, to: Reg, map: BorrowedFd<'_>) {
        // An instruction of two slots. BPF_PSEUDO_MAP_VALUE is 2, in the place of the source register.
        self.emit(0x18, (to, Reg::R2), 0, map.as_raw_fd());
        self.emit(0, (Reg::R0, Reg::R0), 0, 0);
    }

    /// `to` = the map itself, for helpers (BPF_PSEUDO_MAP_FD).
    pub(crate) fn map(&mut self, to: Reg, map: BorrowedFd<'_>) {
        // BPF_PSEUDO_MAP_FD is 1, in the place of the source register.
        self.emit(0x18, (to, Reg::R1), 0, map.as_raw_fd());
        self.emit(0, (Reg::R0, Reg::R0), 0, 0);
    }

    /// `to = *(size *)(from + offset)`.
    pub(crate) fn load(&mut self, size: Size, to: Reg, from: Reg, offset: i16) {
        self.emit(0x61 | size as u8, (to, from), offset, 0);
    }

    /// `*(size *)(to + offset) = value`.
    pub(crate) fn store(&mut self, size: Size, to: Reg, offset: i16, value: i32) {
        self.emit(0x62 | size as u8, (to, Reg::R0), offset, value);
    }

    /// Calls a helper (enum bpf_func_id).
    pub(crate) fn call(&mut self, helper: i32) {
        self.emit(0x85, (Reg::R0, Reg::R0), 0, helper);
    }

    /// Jumps.
    pub(crate) fn goto(&mut self, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.emit(0x05, (Reg::R0, Reg::R0), 0, 0);
    }

    /// Jumps if the condition holds for the word `register` (BPF_JMP32).
    pub(crate) fn goto_if(&mut self, register: Reg, cond: Cond, value: u32, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.emit(0x06 | cond as u8, (register, Reg::R0), 0, value.cast_signed());
    }

    /// Jumps if the signed `register` is below 0.
    pub(crate) fn goto_if_negative(&mut self, register: Reg, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.emit(0xc5, (register, Reg::R0), 0, 0);
    }

    /// Jumps if the unsigned double word `register` is above `value`.
    pub(crate) fn goto_if_above(&mut self, register: Reg, value: i32, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.emit(0x25, (register, Reg::R0), 0, value);
    }

    /// `return value`.
    pub(crate) fn exit(&mut self, value: i32) {
        self.set(Reg::R0, value);
        self.emit(0x95, (Reg::R0, Reg::R0), 0, 0);
    }

    /// The code.
    ///
    /// # Panics
    /// If a label is unbound, or a jump is longer than 32,767 instructions.
    pub(crate) fn finish(mut self) -> Vec<u64> {
        for (at, label) in self.jumps {
            let target = self.labels[label.0].expect("the label is bound");
            let offset = i16::try_from(target as isize - at as isize - 1).expect("a short program");
            self.code[at][2..4].copy_from_slice(&offset.to_ne_bytes());
        }
        self.code.into_iter().map(u64::from_ne_bytes).collect()
    }
}
