//! `towpath bpf`: checks, runs, lists and measures BPF framing programs.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::builder::ValueHint;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use towpath_bpf::{Code, Context, LoadError, LoadOptions, Program, Stats};

use crate::args::exit;
use crate::cli::{self, fail};

/// Check, run, list and measure framing programs in BPF
///
/// FILE is an ELF object made by `clang -O2 -target bpf -c`, raw eBPF instructions, raw classic BPF (struct
/// sock_filter), or the output of `tcpdump -ddd`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 done, 1 a file cannot be read or the run failed, 3 the program is refused."
)]
pub(crate) struct Bpf {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Check whether the verifier accepts a program; if not, print the instruction and the broken rule
    Check {
        #[command(flatten)]
        source: Source,
    },
    /// Run a program on the bytes of a message and print its result
    Run {
        #[command(flatten)]
        source: Source,
        /// The bytes of the message received so far: a file, `-` for standard input, or with --hex the bytes themselves
        #[arg(value_name = "MESSAGE", value_hint = ValueHint::FilePath)]
        message: String,
        /// MESSAGE is in hexadecimal, e.g. `000f 0a`; blanks and colons may separate bytes
        #[arg(long)]
        hex: bool,
        /// Maximum number of instructions to run
        #[arg(long, value_name = "N", default_value_t = 1_000_000)]
        fuel: u64,
        /// The connection's state before the run: up to five numbers, for cb[0] to cb[4]
        #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = word)]
        cb: Vec<u32>,
    },
    /// List a program's instructions, accepted or not
    Disasm {
        #[command(flatten)]
        source: Source,
    },
    /// Print the verifier's statistics of a program
    Stats {
        #[command(flatten)]
        source: Source,
    },
}

/// Source of the program and output format.
#[derive(Debug, Args)]
struct Source {
    /// The program
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,
    /// Select a program of an object with several programs, by function or section name
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Format of FILE
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    format: Format,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// Detect the format
    Auto,
    /// An ELF object
    Elf,
    /// Raw eBPF instructions, little-endian
    Raw,
    /// Raw classic BPF, little-endian
    Classic,
    /// The text of `tcpdump -ddd`
    Ddd,
}

/// Maximum size of a program file or a message, in bytes.
const MAX_FILE: u64 = 64 << 20;

/// `-ESTRPIPE` (`asm-generic/errno.h`): another protocol begins; the connection leaves the mux.
const GIVE_BACK: i32 = -86;

pub(crate) fn run(args: &Bpf) -> u8 {
    let (Action::Check { source }
    | Action::Run { source, .. }
    | Action::Disasm { source }
    | Action::Stats { source }) = &args.action;
    let bytes = match read(&source.file) {
        Ok(bytes) => bytes,
        Err(error) => return source.fails(exit::FAILED, &error),
    };
    let code = match Code::load(&bytes, &source.options()) {
        Ok(code) => code,
        Err(error) => return source.refuses(&error),
    };
    if let Action::Disasm { .. } = args.action {
        return disasm(source, &code);
    }
    let program = match code.verify() {
        Ok(program) => program,
        Err(error) => return source.refuses(&error.into()),
    };
    match &args.action {
        Action::Run { message, hex, fuel, cb, .. } => {
            let message = if *hex { parse_hex(message) } else { read(Path::new(message)) };
            match message {
                Ok(message) => run_once(source, &program, &message, *fuel, cb),
                Err(error) => source.fails(exit::FAILED, &error),
            }
        }
        Action::Stats { .. } => stats(source, program.stats()),
        Action::Check { .. } | Action::Disasm { .. } => check(source, &code, program.stats()),
    }
}

fn check(source: &Source, code: &Code, stats: Stats) -> u8 {
    let kind = kind(stats);
    let function = code.function(0);
    if source.json {
        let file = source.file.display().to_string();
        return print_json(
            exit::OK,
            &json!({ "file": file, "ok": true, "kind": kind, "function": function,
            "instructions": stats.instructions }),
        );
    }
    let name = function.map(|name| format!(", program `{name}`")).unwrap_or_default();
    let (file, count) = (source.file.display(), stats.instructions);
    cli::answer(exit::OK, &format!("{file}: accepted{name}, {count} instructions of {kind}\n"))
}

fn run_once(source: &Source, program: &Program, message: &[u8], fuel: u64, cb: &[u32]) -> u8 {
    let mut context = Context::new();
    if cb.len() > context.cb.len() {
        return source.fails(exit::USAGE, "--cb takes at most five numbers");
    }
    for (word, value) in context.cb.iter_mut().zip(cb) {
        *word = *value;
    }
    let mut left = fuel;
    let result = program.run(message, &mut context, &mut left);
    let used = fuel - left;
    let result = match result {
        Ok(result) => result,
        Err(error) => return source.fails(exit::FAILED, &error.to_string()),
    };
    let Context { cb, mark, hash } = context;
    let (outcome, words) = answer(result, mark);
    if source.json {
        return print_json(
            exit::OK,
            &json!({ "result": result, "outcome": outcome, "mark": mark, "hash": hash, "cb": cb,
            "fuel_used": used }),
        );
    }
    let text = format!(
        "result {result}: {words}\nmark {mark}, hash {hash}, cb {cb:?}\nfuel used: {used} of {fuel}\n"
    );
    cli::answer(exit::OK, &text)
}

/// The meaning of a result for the mux: an identifier for `--json` and a sentence for text output.
fn answer(result: i32, mark: u32) -> (&'static str, String) {
    match result {
        1.. => ("message", format!("the message has {result} bytes")),
        0 if mark > 0 => ("need", format!("more bytes are needed, at least {mark} in all")),
        0 => ("need", "more bytes are needed".to_owned()),
        GIVE_BACK => ("give_back", "the connection is given back (-ESTRPIPE)".to_owned()),
        _ => ("error", format!("error {}", result.unsigned_abs())),
    }
}

fn disasm(source: &Source, code: &Code) -> u8 {
    if source.json {
        let rows: Vec<Value> = code
            .listing()
            .map(|row| {
                json!({ "instruction": row.instruction, "function": row.function, "bytes": to_hex(&row.bytes),
                    "text": row.text })
            })
            .collect();
        return print_json(exit::OK, &json!({ "classic": code.is_classic(), "instructions": rows }));
    }
    cli::answer(exit::OK, &code.to_string())
}

fn stats(source: &Source, stats: Stats) -> u8 {
    let rows = [
        ("instructions", stats.instructions as u64),
        ("operations", stats.operations as u64),
        ("unreached", stats.unreached as u64),
        ("functions", stats.functions as u64),
        ("depth", stats.depth as u64),
        ("stack_bytes", stats.stack as u64),
        ("message_loads", stats.message_loads as u64),
        ("variable_loads", stats.variable_loads as u64),
        ("context_accesses", stats.context_accesses as u64),
        ("branches", stats.branches as u64),
        ("back_edges", stats.back_edges as u64),
        ("checker_steps", u64::from(stats.steps)),
    ];
    if source.json {
        let mut object: serde_json::Map<String, Value> =
            rows.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        object.insert("kind".to_owned(), json!(kind(stats)));
        return print_json(exit::OK, &Value::Object(object));
    }
    let mut text = format!("{:17} {:>8}\n", "kind", kind(stats));
    text.extend(rows.iter().map(|(name, value)| format!("{:17} {value:>8}\n", name.replace('_', " "))));
    cli::answer(exit::OK, &text)
}

const fn kind(stats: Stats) -> &'static str {
    if stats.classic { "classic" } else { "eBPF" }
}

impl Source {
    fn options(&self) -> LoadOptions {
        let format = match self.format {
            Format::Auto => towpath_bpf::Format::Auto,
            Format::Elf => towpath_bpf::Format::Elf,
            Format::Raw => towpath_bpf::Format::Raw,
            Format::Classic => towpath_bpf::Format::Classic,
            Format::Ddd => towpath_bpf::Format::ClassicText,
        };
        LoadOptions { format, name: self.name.clone() }
    }

    fn refuses(&self, error: &LoadError) -> u8 {
        if !self.json {
            return fail(exit::BAD_RULES, format_args!("{}: {error}", self.file.display()));
        }
        let mut report =
            json!({ "file": self.file.display().to_string(), "ok": false, "error": error.to_string() });
        if let LoadError::Rejected(error) = error {
            report["instruction"] = json!(error.instruction);
            report["function"] = json!(error.function);
            report["text"] = json!(error.text);
            report["reason"] = json!(error.reason.to_string());
        }
        print_json(exit::BAD_RULES, &report)
    }

    fn fails(&self, code: u8, error: &str) -> u8 {
        if !self.json {
            return fail(code, error);
        }
        print_json(code, &json!({ "file": self.file.display().to_string(), "ok": false, "error": error }))
    }
}

fn print_json(code: u8, value: &Value) -> u8 {
    cli::answer(code, &format!("{value}\n"))
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let read = || -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let source: &mut dyn Read =
            if path == Path::new("-") { &mut io::stdin().lock() } else { &mut File::open(path)? };
        source.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    match read() {
        Ok(bytes) if bytes.len() as u64 > MAX_FILE => {
            Err(format!("{}: larger than {} MiB", path.display(), MAX_FILE >> 20))
        }
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

fn parse_hex(text: &str) -> Result<Vec<u8>, String> {
    let digits: Vec<u32> = text
        .chars()
        .filter(|character| !character.is_whitespace() && *character != ':')
        .map(|character| {
            character.to_digit(16).ok_or_else(|| format!("`{character}` is not a hexadecimal digit"))
        })
        .collect::<Result<_, _>>()?;
    let (pairs, rest) = digits.as_chunks();
    if !rest.is_empty() {
        return Err(format!("{} hexadecimal digits are not a whole number of bytes", digits.len()));
    }
    // Two hexadecimal digits of four bits each.
    Ok(pairs.iter().map(|[high, low]| (high << 4 | low) as u8).collect())
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Parses a 32-bit number, decimal or hexadecimal with `0x`.
fn word(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("`{text}` is not a number from 0 to 4294967295"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_in_any_dress() {
        let rows: [(&str, Result<&[u8], &str>); 6] = [
            ("", Ok(&[])),
            ("000f", Ok(&[0, 15])),
            ("00 0F:a0\n01", Ok(&[0, 15, 160, 1])),
            ("f f", Ok(&[255])),
            ("abc", Err("3 hexadecimal digits are not a whole number of bytes")),
            ("0x12", Err("`x` is not a hexadecimal digit")),
        ];
        for (text, expected) in rows {
            let parsed = parse_hex(text);
            assert_eq!(parsed.as_deref().map_err(String::as_str), expected, "{text:?}");
            if let Ok(bytes) = parsed {
                assert_eq!(parse_hex(&to_hex(&bytes)).as_deref(), Ok(&bytes[..]));
            }
        }
    }

    #[test]
    fn answers_in_words() {
        let rows = [
            (7, 0, "message", "the message has 7 bytes"),
            (0, 0, "need", "more bytes are needed"),
            (0, 12, "need", "more bytes are needed, at least 12 in all"),
            (-74, 0, "error", "error 74"),
            (-86, 0, "give_back", "the connection is given back (-ESTRPIPE)"),
            (i32::MIN, 0, "error", "error 2147483648"),
        ];
        for (result, mark, outcome, words) in rows {
            assert_eq!(answer(result, mark), (outcome, words.to_owned()));
        }
    }

    #[test]
    fn words_are_decimal_or_hexadecimal() {
        assert_eq!((word("7"), word("0xff")), (Ok(7), Ok(255)));
        assert!(word("-1").is_err() && word("4294967296").is_err());
    }
}
