//! An unverified program: read from any of the formats and linked.

use std::fmt;

use thiserror::Error;

use crate::classic::{self, ClassicInsn, MAX_CLASSIC_INSTRUCTIONS};
use crate::disasm;
use crate::elf::{self, ElfError};
use crate::insn::{Insn, Kind, decode};
use crate::verifier_error::VerifierError;

/// Format of a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Detects the format: ELF by its magic, `tcpdump -ddd` by being text, raw eBPF by having an exit instruction (every eBPF
    /// program has one, and no classic instruction looks like it), else raw classic BPF.
    #[default]
    Auto,
    /// An ELF object made by clang for the BPF target.
    Elf,
    /// eBPF instructions of eight bytes, little-endian.
    Raw,
    /// `struct sock_filter`s, little-endian.
    Classic,
    /// The output of `tcpdump -ddd`: a count, then a line `code jt jf k` of decimal numbers for each instruction.
    ClassicText,
}

/// How to load a program.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Format of the bytes.
    pub format: Format,
    /// Which program of an ELF object, by function or section; needed when there are several.
    pub name: Option<String>,
}

/// The bytes are not a program, or the verifier refuses it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The input is empty.
    #[error("the program is empty")]
    Empty,
    /// Not a whole number of instructions.
    #[error(
        "{0} bytes are no whole number of eight-byte instructions, no ELF object and no `tcpdump -ddd` text"
    )]
    Length(usize),
    /// `tcpdump -ddd` text with an error.
    #[error("line {line}: {problem}")]
    Text {
        /// The line, 1 first.
        line: usize,
        /// The error.
        problem: String,
    },
    /// A name was given for a program that has none.
    #[error("only ELF objects have programs with names, so `{0}` cannot be chosen")]
    NoNames(String),
    /// The ELF object contains no usable program.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// The verifier refuses the program.
    #[error(transparent)]
    Rejected(#[from] VerifierError),
}

/// A program before verification. It can be listed but not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    pub(crate) body: Body,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    Classic(Vec<ClassicInsn>),
    Ebpf {
        code: Vec<Insn>,
        /// First instructions and names, ascending; empty for raw instructions.
        functions: Vec<(usize, String)>,
    },
}

impl Code {
    /// Reads a program.
    ///
    /// # Errors
    /// Fails if the bytes are not in the format, or if the object does not contain the program.
    pub fn load(bytes: &[u8], options: &LoadOptions) -> Result<Self, LoadError> {
        let format = match options.format {
            Format::Auto => guess(bytes),
            format => format,
        };
        if let (Some(name), false) = (&options.name, format == Format::Elf) {
            return Err(LoadError::NoNames(name.clone()));
        }
        let body = match format {
            Format::Elf => {
                let linked = elf::link(bytes, options.name.as_deref())?;
                Body::Ebpf { code: linked.code, functions: linked.functions }
            }
            Format::ClassicText => Body::Classic(parse_text(bytes)?),
            Format::Classic => {
                Body::Classic(slots(bytes)?.iter().map(|slot| ClassicInsn::parse(*slot)).collect())
            }
            Format::Raw | Format::Auto => Body::Ebpf {
                code: slots(bytes)?.iter().map(|slot| Insn::parse(*slot)).collect(),
                functions: Vec::new(),
            },
        };
        Ok(Self { body })
    }

    /// True for classic BPF.
    #[must_use]
    pub fn is_classic(&self) -> bool {
        matches!(self.body, Body::Classic(_))
    }

    /// Instructions, in slots of eight bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.body {
            Body::Classic(code) => code.len(),
            Body::Ebpf { code, .. } => code.len(),
        }
    }

    /// True when there is no instruction; such a program is refused.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The function that an instruction belongs to, where names are known.
    #[must_use]
    pub fn function(&self, instruction: usize) -> Option<&str> {
        let Body::Ebpf { functions, .. } = &self.body else { return None };
        functions.iter().rev().find(|(start, _)| *start <= instruction).map(|(_, name)| name.as_str())
    }

    /// One instruction as text; None where none can be decoded.
    #[must_use]
    pub fn text(&self, instruction: usize) -> Option<String> {
        match &self.body {
            Body::Classic(code) => {
                let insn = *code.get(instruction)?;
                let kind = classic::decode(insn).ok()?;
                Some(disasm::Classic(instruction, insn, kind).to_string())
            }
            Body::Ebpf { code, .. } => {
                let kind = decode(code.get(instruction..)?).ok()?;
                Some(disasm::Ebpf(instruction, kind).to_string())
            }
        }
    }

    /// The listing, one row per instruction: index, bytes in hex, text. A row that cannot be decoded has the reason.
    pub fn listing(&self) -> impl Iterator<Item = Row> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let row = self.row(at)?;
            at += row.bytes.len() / Insn::SIZE;
            Some(row)
        })
    }

    fn row(&self, at: usize) -> Option<Row> {
        let function = |functions: &[(usize, String)]| {
            functions.iter().find(|(start, _)| *start == at).map(|(_, name)| name.clone())
        };
        match &self.body {
            Body::Classic(code) => {
                let insn = *code.get(at)?;
                let text = classic::decode(insn).map_or_else(
                    |reason| format!("; {reason}"),
                    |kind| disasm::Classic(at, insn, kind).to_string(),
                );
                let [c0, c1] = insn.code.to_le_bytes();
                let [k0, k1, k2, k3] = insn.k.to_le_bytes();
                let bytes = vec![c0, c1, insn.jt, insn.jf, k0, k1, k2, k3];
                Some(Row { instruction: at, function: None, bytes, text })
            }
            Body::Ebpf { code, functions } => {
                let rest = code.get(at..).filter(|rest| !rest.is_empty())?;
                let decoded = decode(rest);
                let slots = decoded.map_or(1, Kind::slots);
                let text = decoded
                    .map_or_else(|reason| format!("; {reason}"), |kind| disasm::Ebpf(at, kind).to_string());
                let bytes = rest.iter().take(slots).flat_map(|insn| insn.emit()).collect();
                Some(Row { instruction: at, function: function(functions), bytes, text })
            }
        }
    }
}

/// A row of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The instruction's number, in slots of eight bytes.
    pub instruction: usize,
    /// The name of the function that begins here.
    pub function: Option<String>,
    /// Its encoding: 8 bytes, or 16 for a 64-bit immediate load.
    pub bytes: Vec<u8>,
    /// The disassembled instruction; a comment after `;` if it cannot be decoded.
    pub text: String,
}

impl fmt::Display for Code {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in self.listing() {
            if let Some(name) = &row.function {
                writeln!(out, "{name}:")?;
            }
            writeln!(out, "{:5}: {}", row.instruction, row.text)?;
        }
        Ok(())
    }
}

fn guess(bytes: &[u8]) -> Format {
    if bytes.starts_with(elf::MAGIC) {
        return Format::Elf;
    }
    if bytes.iter().all(|byte| byte.is_ascii_digit() || byte.is_ascii_whitespace()) {
        return Format::ClassicText;
    }
    // BPF_JMP|BPF_EXIT in the first byte, as an instruction of classic BPF never has it.
    if bytes.chunks(Insn::SIZE).any(|slot| slot.first() == Some(&0x95)) {
        Format::Raw
    } else {
        Format::Classic
    }
}

fn slots(bytes: &[u8]) -> Result<&[[u8; Insn::SIZE]], LoadError> {
    match bytes.as_chunks() {
        ([], []) => Err(LoadError::Empty),
        (slots, []) => Ok(slots),
        _ => Err(LoadError::Length(bytes.len())),
    }
}

/// Parses the output of `tcpdump -ddd`.
fn parse_text(bytes: &[u8]) -> Result<Vec<ClassicInsn>, LoadError> {
    let wrong = |line: usize, problem: String| LoadError::Text { line, problem };
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        wrong(before.iter().filter(|byte| **byte == b'\n').count() + 1, "not text".to_owned())
    })?;
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let Some((_, count)) = lines.next() else { return Err(LoadError::Empty) };
    let count: usize = count
        .trim()
        .parse()
        .map_err(|_| wrong(1, format!("`{}` is not the number of instructions", count.trim())))?;
    if count > MAX_CLASSIC_INSTRUCTIONS {
        return Err(wrong(
            1,
            format!("{count} instructions; a program has at most {MAX_CLASSIC_INSTRUCTIONS}"),
        ));
    }
    let mut code = Vec::with_capacity(count);
    for (number, line) in lines {
        let insn = parse_line(line).ok_or_else(|| {
            wrong(number + 1, format!("`{}` is not `code jt jf k` in decimal numbers", line.trim()))
        })?;
        if code.len() == count {
            return Err(wrong(number + 1, format!("more than the {count} instructions of line 1")));
        }
        code.push(insn);
    }
    if code.len() < count {
        return Err(wrong(1, format!("{count} instructions are announced, {} follow", code.len())));
    }
    Ok(code)
}

fn parse_line(line: &str) -> Option<ClassicInsn> {
    let mut words = line.split_whitespace();
    let insn = ClassicInsn {
        code: words.next()?.parse().ok()?,
        jt: words.next()?.parse().ok()?,
        jf: words.next()?.parse().ok()?,
        k: words.next()?.parse().ok()?,
    };
    if words.next().is_some() { None } else { Some(insn) }
}
