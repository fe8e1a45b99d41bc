//! Reads ELF objects of clang: lists their programs, and links one of them.
//!
//! What: the chosen function comes first. Every function that it calls, directly or not, follows once. Calls are
//! turned into distances between instructions. Nothing else of an object is used: maps and global data are refused,
//! debug information and BTF are ignored.
//!
//! References: RFC 9669; the LLVM document "BPF relocation types" for R_BPF_64_64 and R_BPF_64_32.

use std::collections::BTreeMap;

use object::elf::{EM_BPF, ET_REL, FileHeader64, R_BPF_64_32, R_BPF_64_64};
use object::read::elf::{ElfFile64, FileHeader};
use object::{
    LittleEndian, Object, ObjectSection, ObjectSymbol, RelocationFlags, RelocationTarget, SectionKind,
    SymbolIndex, SymbolKind,
};
use thiserror::Error;

use crate::insn::Insn;
use crate::verifier::MAX_INSTRUCTIONS;

/// The first bytes of an ELF file.
pub(crate) const MAGIC: &[u8] = b"\x7fELF";

/// Prefixes of the names of sections whose functions are programs, as in libbpf.
const PROGRAM_SECTIONS: [&str; 2] = ["socket", "sk_skb"];

/// `BPF_PSEUDO_CALL` of `linux/bpf.h`: the source field of a call of the program's own.
const PSEUDO_CALL: u8 = 1;

/// Functions that one program may have; bounds the work of linking.
const MAX_FUNCTIONS: usize = 256;

/// Why no program of an ELF object can be linked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ElfError {
    /// The file is damaged.
    #[error("damaged ELF object: {0}")]
    Damaged(String),
    /// Another machine's object.
    #[error("the object is not for BPF; compile it with `clang -O2 -target bpf -c`")]
    NotBpf,
    /// Compiled for big-endian BPF.
    #[error("the object is for big-endian BPF; compile it with `clang -O2 -target bpfel -c`")]
    BigEndian,
    /// No section of a kind that holds programs.
    #[error("no program: put the function into SEC(\"socket\") or SEC(\"sk_skb/stream_parser\")")]
    NoProgram,
    /// Several programs, none chosen.
    #[error("{} programs, choose one by name: {}", .0.len(), .0.join(", "))]
    Several(Vec<String>),
    /// The requested program does not exist.
    #[error("no program `{0}`; there is {list}", list = .1.join(", "))]
    Unknown(String, Vec<String>),
    /// A map.
    #[error(
        "function `{function}` uses the map `{name}`; a framing program has none, its state is cb[0] to cb[4]"
    )]
    Map {
        /// The function that uses it.
        function: String,
        /// The map's name.
        name: String,
    },
    /// A global or constant variable.
    #[error(
        "function `{function}` uses `{name}` in section {section}; a framing program has no global data: \
         use constants in code, local variables, or cb[0] to cb[4]"
    )]
    Data {
        /// The function that uses it.
        function: String,
        /// The variable's name.
        name: String,
        /// Its section.
        section: String,
    },
    /// A function that the object does not contain.
    #[error("function `{function}` calls `{name}`, which is not in the object")]
    Undefined {
        /// The caller.
        function: String,
        /// The function called.
        name: String,
    },
    /// A relocation that no BPF compiler makes for code.
    #[error("function `{function}` has a relocation of type {kind} at byte {offset}, which is not supported")]
    Relocation {
        /// The function.
        function: String,
        /// The relocation's type.
        kind: u32,
        /// Byte offset in the function.
        offset: u64,
    },
    /// A call to something that is not the start of a function.
    #[error("function `{function}` calls byte {target} of section {section}, where no function begins")]
    NoFunction {
        /// The caller.
        function: String,
        /// The section.
        section: String,
        /// The byte in the section.
        target: i64,
    },
    /// Too much code.
    #[error(
        "the program and what it calls have more than {MAX_FUNCTIONS} functions or {MAX_INSTRUCTIONS} instructions"
    )]
    TooLong,
}

/// A linked program: instructions, and where each function begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Linked {
    pub(crate) code: Vec<Insn>,
    pub(crate) functions: Vec<(usize, String)>,
}

/// A function of the object.
#[derive(Clone, Debug)]
struct Function {
    name: String,
    section: usize,
    start: u64,
    size: u64,
}

/// A relocation, by what it means.
#[derive(Clone, Debug)]
struct Relocation {
    kind: u32,
    symbol: Option<SymbolIndex>,
}

type File<'data> = ElfFile64<'data, LittleEndian>;

/// Links the program `name`, or the only one.
///
/// # Errors
/// The object is damaged or not for BPF, has not exactly one program of that name, or uses what is not supported.
pub(crate) fn link(data: &[u8], name: Option<&str>) -> Result<Linked, ElfError> {
    let object = Link::parse(data)?;
    let chosen = object.choose(name)?;
    object.link(chosen)
}

struct Link<'data> {
    file: File<'data>,
    /// Every function of a section with code, by section and start.
    functions: BTreeMap<(usize, u64), Function>,
    /// The relocations of sections with code, by section and place.
    relocations: BTreeMap<(usize, u64), Relocation>,
}

impl<'data> Link<'data> {
    fn parse(data: &'data [u8]) -> Result<Self, ElfError> {
        // e_ident: class 2 is 64-bit, data 2 is big-endian (`elf.h`).
        if data.get(4) != Some(&2) {
            return Err(ElfError::NotBpf);
        }
        if data.get(5) == Some(&2) {
            // e_machine in the other byte order.
            let bpf = data.get(18..20).is_some_and(|machine| machine == EM_BPF.0.to_be_bytes());
            return Err(if bpf { ElfError::BigEndian } else { ElfError::NotBpf });
        }
        let file = File::parse(data).map_err(damaged)?;
        let header: &FileHeader64<LittleEndian> = file.elf_header();
        if header.e_machine(LittleEndian) != EM_BPF || header.e_type(LittleEndian) != ET_REL {
            return Err(ElfError::NotBpf);
        }
        let mut object = Self { file, functions: BTreeMap::new(), relocations: BTreeMap::new() };
        object.read_relocations();
        object.read_functions()?;
        Ok(object)
    }

    fn read_relocations(&mut self) {
        for section in self.file.sections().filter(|section| section.kind() == SectionKind::Text) {
            for (offset, relocation) in section.relocations() {
                let symbol = match relocation.target() {
                    RelocationTarget::Symbol(symbol) => Some(symbol),
                    _ => None,
                };
                let kind = match relocation.flags() {
                    RelocationFlags::Elf { r_type } => r_type.0,
                    _ => 0,
                };
                self.relocations.insert((section.index().0, offset), Relocation { kind, symbol });
            }
        }
    }

    fn read_functions(&mut self) -> Result<(), ElfError> {
        let mut found = Vec::new();
        for symbol in self.file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text) {
            let Some(section) = symbol.section_index() else { continue };
            let name = symbol.name().map_err(damaged)?.to_owned();
            found.push(Function { name, section: section.0, start: symbol.address(), size: symbol.size() });
        }
        for function in found {
            let code = self.code(&function)?;
            // A symbol without size, from an assembler, reaches to the end of its section.
            let size = if function.size == 0 { code.len() as u64 } else { function.size };
            self.functions.insert((function.section, function.start), Function { size, ..function });
        }
        Ok(())
    }

    /// A function's bytes.
    fn code(&self, function: &Function) -> Result<&'data [u8], ElfError> {
        let section = self.file.section_by_index(object::SectionIndex(function.section)).map_err(damaged)?;
        let data = section.data().map_err(damaged)?;
        let outside = || ElfError::Damaged(format!("function `{}` is outside its section", function.name));
        let start = usize::try_from(function.start).map_err(|_| outside())?;
        let rest = data.get(start..).ok_or_else(outside)?;
        let code = match usize::try_from(function.size).map_err(|_| outside())? {
            0 => rest,
            size => rest.get(..size).ok_or_else(outside)?,
        };
        if start % Insn::SIZE != 0 || code.len() % Insn::SIZE != 0 || section.kind() != SectionKind::Text {
            return Err(ElfError::Damaged(format!(
                "function `{}` is not made of instructions",
                function.name
            )));
        }
        Ok(code)
    }

    fn section_name(&self, section: usize) -> String {
        let section = self.file.section_by_index(object::SectionIndex(section));
        section.ok().and_then(|section| section.name().ok().map(str::to_owned)).unwrap_or_default()
    }

    /// The program with this function or section name, or the only one.
    fn choose(&self, name: Option<&str>) -> Result<&Function, ElfError> {
        let programs: Vec<(&Function, String)> = self
            .functions
            .values()
            .map(|function| (function, self.section_name(function.section)))
            .filter(|(_, section)| PROGRAM_SECTIONS.iter().any(|prefix| section.starts_with(prefix)))
            .collect();
        let names =
            || programs.iter().map(|(function, section)| format!("{} ({section})", function.name)).collect();
        let matching: Vec<&Function> = programs
            .iter()
            .filter(|(function, section)| name.is_none_or(|name| name == function.name || name == section))
            .map(|(function, _)| *function)
            .collect();
        match (matching.as_slice(), name) {
            ([one], _) => Ok(one),
            _ if programs.is_empty() => Err(ElfError::NoProgram),
            ([], Some(name)) => Err(ElfError::Unknown(name.to_owned(), names())),
            _ => Err(ElfError::Several(names())),
        }
    }

    fn link(&self, chosen: &Function) -> Result<Linked, ElfError> {
        let mut linked = Linked { code: Vec::new(), functions: Vec::new() };
        // Positions of the placed functions, and calls to fill in: instruction, and function by section and start.
        let mut placed = BTreeMap::new();
        let mut calls = Vec::new();
        let mut waiting = vec![chosen];
        while let Some(function) = waiting.pop() {
            let key = (function.section, function.start);
            if placed.contains_key(&key) {
                continue;
            }
            let base = linked.code.len();
            placed.insert(key, base);
            linked.functions.push((base, function.name.clone()));
            let (slots, _) = self.code(function)?.as_chunks();
            linked.code.extend(slots.iter().map(|slot| Insn::parse(*slot)));
            if linked.code.len() > MAX_INSTRUCTIONS || placed.len() > MAX_FUNCTIONS {
                return Err(ElfError::TooLong);
            }
            for at in 0..slots.len() {
                if let Some(target) = self.called(function, at, linked.code[base + at])? {
                    calls.push((base + at, (target.section, target.start)));
                    waiting.push(target);
                }
            }
        }
        for (at, key) in calls {
            let target = placed.get(&key).copied().unwrap_or(0);
            // Both are below `MAX_INSTRUCTIONS`.
            linked.code[at].imm = i32::try_from(target as i64 - at as i64 - 1).unwrap_or(i32::MAX);
        }
        Ok(linked)
    }

    /// The function that the instruction calls, if it is a call of the program's own.
    fn called(&self, function: &Function, at: usize, insn: Insn) -> Result<Option<&Function>, ElfError> {
        let offset = (at * Insn::SIZE) as u64;
        let place = function.start + offset;
        let is_call = insn.code == 0x85 && insn.src == PSEUDO_CALL;
        let Some(relocation) = self.relocations.get(&(function.section, place)) else {
            // Within a section, the compiler has written the distance.
            let target = (place as i64).saturating_add((i64::from(insn.imm) + 1) * Insn::SIZE as i64);
            return if is_call {
                self.function_at(function, function.section, target).map(Some)
            } else {
                Ok(None)
            };
        };
        let symbol = relocation.symbol.and_then(|symbol| self.file.symbol_by_index(symbol).ok());
        let name = symbol.as_ref().and_then(|symbol| symbol.name().ok()).unwrap_or_default().to_owned();
        let section = symbol.as_ref().and_then(ObjectSymbol::section_index).map(|section| section.0);
        match (relocation.kind, section) {
            (kind, Some(section)) if kind == R_BPF_64_32.0 && is_call => {
                // The symbol is the function, or the section with the distance in the immediate.
                let value = symbol.as_ref().map_or(0, ObjectSymbol::address);
                let target = (value as i64).saturating_add((i64::from(insn.imm) + 1) * Insn::SIZE as i64);
                self.function_at(function, section, target).map(Some)
            }
            (kind, None) if kind == R_BPF_64_32.0 => {
                Err(ElfError::Undefined { function: function.name.clone(), name })
            }
            (kind, section) if kind == R_BPF_64_64.0 => Err(self.refuse_data(function, name, section)),
            (kind, _) => Err(ElfError::Relocation { function: function.name.clone(), kind, offset }),
        }
    }

    /// Why the address of `name` cannot be resolved.
    fn refuse_data(&self, function: &Function, name: String, section: Option<usize>) -> ElfError {
        let function = function.name.clone();
        let section = section.map(|section| self.section_name(section)).unwrap_or_default();
        match section.as_str() {
            "maps" | ".maps" => ElfError::Map { function, name },
            "" => ElfError::Undefined { function, name },
            _ => ElfError::Data {
                function,
                name: if name.is_empty() { section.clone() } else { name },
                section,
            },
        }
    }

    fn function_at(&self, caller: &Function, section: usize, target: i64) -> Result<&Function, ElfError> {
        let start = u64::try_from(target).ok();
        start.and_then(|start| self.functions.get(&(section, start))).ok_or_else(|| ElfError::NoFunction {
            function: caller.name.clone(),
            section: self.section_name(section),
            target,
        })
    }
}

fn damaged(error: object::Error) -> ElfError {
    ElfError::Damaged(error.to_string())
}
