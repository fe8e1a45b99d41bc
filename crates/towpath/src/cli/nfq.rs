//! `towpath nfq`: runs a program for NFQUEUE on the queues of an engine.
//!
//! The dynamic loader loads Towpath's libnetfilter_queue first (LD_PRELOAD). Every library and plug-in of the program that needs
//! `libnetfilter_queue.so.1` gets it, also one with an RPATH.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use clap::builder::ValueHint;
use towpath::control::client::{Engine, Failure};

use crate::args::exit;
use crate::cli::{fail, say};

/// Run a program for NFQUEUE on the queues of a running engine
///
/// PROGRAM is linked to libnetfilter_queue. It gets Towpath's libnetfilter_queue in place of the system's, and runs unchanged: queue N of
/// the program is queue N of the engine. Each queue needs a `socket` in the engine's configuration. A program that the engine starts
/// (`command` of a queue) gets the queue that it was started for, whatever its number.
#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  towpath nfq -- suricata -c suricata.yaml -q 1
  towpath nfq --queue 0=1 -- python3 filter.py")]
pub(crate) struct Nfq {
    /// The engine's control socket (default: $TOWPATH_CONTROL, then /run/towpath/control.sock)
    #[arg(long, value_name = "SOCKET", value_hint = ValueHint::FilePath)]
    engine: Option<PathBuf>,

    /// Queue N of the program is queue M of the engine; may be repeated
    #[arg(long = "queue", value_name = "N=M", value_parser = pair)]
    queues: Vec<(u16, u16)>,

    /// Towpath's libnetfilter_queue (default: ../lib/towpath/libnetfilter_queue.so.1 from this program)
    #[arg(long, value_name = "FILE", env = "TOWPATH_NFQUEUE_LIBRARY", value_hint = ValueHint::FilePath)]
    library: Option<PathBuf>,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM", value_hint = ValueHint::CommandWithArguments)]
    program: Vec<OsString>,
}

/// Reads `N=M`.
fn pair(text: &str) -> Result<(u16, u16), String> {
    let numbers = text.split_once('=').and_then(|(n, m)| Some((n.parse().ok()?, m.parse().ok()?)));
    numbers.ok_or_else(|| "write N=M: queue N of the program is queue M of the engine".to_owned())
}

pub(crate) fn run(args: &Nfq) -> u8 {
    match prepare(args) {
        Ok(mut command) => {
            let error = command.exec();
            fail(exit::INSPECTOR, format_args!("cannot execute {}: {error}", args.program[0].display()))
        }
        Err(Failure { code, message }) => fail(code, message),
    }
}

/// Checks the program, and sets the environment that it needs.
fn prepare(args: &Nfq) -> Result<Command, Failure> {
    let program = find(&args.program[0])?;
    check(&program)?;
    let mut preload = library(args)?.into_os_string();
    let sockets = sockets(args)?;
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut command = Command::new(program);
    command.arg0(&args.program[0]).args(&args.program[1..]);
    command.env("LD_PRELOAD", preload).env("TOWPATH_NFQUEUE", sockets);
    Ok(command)
}

/// The value of `TOWPATH_NFQUEUE`: the socket of each queue.
fn sockets(args: &Nfq) -> Result<OsString, Failure> {
    let started = std::env::var_os("TOWPATH_SOCKET").filter(|_| args.engine.is_none());
    if let Some(socket) = started {
        return entry("*", Path::new(&socket));
    }
    let engine = args.engine.clone().or_else(|| std::env::var_os("TOWPATH_CONTROL").map(PathBuf::from));
    let engine = Engine::at(engine.unwrap_or_else(|| "/run/towpath/control.sock".into()));
    let answer = engine.ask("show-queues", serde_json::json!({}), "queues")?;
    let queues = answer["queues"].as_array().map(Vec::as_slice).unwrap_or_default();
    let sockets: Vec<(u16, &str)> = queues
        .iter()
        .filter_map(|queue| Some((queue["number"].as_u64()?.try_into().ok()?, queue["socket"].as_str()?)))
        .collect();
    if sockets.is_empty() {
        let at = engine.socket().display();
        let message = format!(
            "the engine at {at} has no queue with a socket; write socket = \"PATH\" in its [queue.N]"
        );
        return Err(Failure::new(exit::NO_ENGINE, message));
    }
    let mut entries = Vec::new();
    for (own, number) in &args.queues {
        let socket = sockets.iter().find(|(queue, _)| queue == number).map(|(_, socket)| *socket);
        let message = || {
            format!(
                "the engine has no queue {number} with a socket; write socket = \"PATH\" in its [queue.{number}]"
            )
        };
        let socket = socket.ok_or_else(|| Failure::new(exit::NO_ENGINE, message()))?;
        entries.push(entry(&own.to_string(), Path::new(socket))?);
    }
    for (number, socket) in sockets {
        entries.push(entry(&number.to_string(), Path::new(socket))?);
    }
    Ok(entries.join(OsStr::new(":")))
}

/// An entry of `TOWPATH_NFQUEUE`.
fn entry(name: &str, socket: &Path) -> Result<OsString, Failure> {
    let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    if socket.as_os_str().as_bytes().contains(&b':') {
        let message =
            format!("{} contains `:`; move the queue's socket to a path without one", socket.display());
        return Err(Failure::new(exit::NO_ENGINE, message));
    }
    let mut entry = OsString::from(format!("{name}="));
    entry.push(socket);
    Ok(entry)
}

/// Towpath's libnetfilter_queue: installed, or in the target directory.
fn library(args: &Nfq) -> Result<PathBuf, Failure> {
    let failure = |message: String| Failure::new(exit::INSPECTOR, message);
    let directory =
        std::env::current_exe().ok().and_then(|own| Some(own.parent()?.to_owned())).unwrap_or_default();
    let places = match &args.library {
        Some(library) => vec![library.clone()],
        None => vec![
            directory.join("../lib/towpath/libnetfilter_queue.so.1"),
            directory.join("libnetfilter_queue.so"),
        ],
    };
    let found = places.iter().find_map(|place| place.canonicalize().ok()).ok_or_else(|| {
        let hint = if args.library.is_some() { "" } else { "; install it, or name it with --library" };
        failure(format!("Towpath's libnetfilter_queue is not at {}{hint}", places[0].display()))
    })?;
    // The separators of LD_PRELOAD (ld.so(8)).
    if found.as_os_str().as_bytes().iter().any(|byte| b" :".contains(byte)) {
        let message =
            format!("{} contains a space or `:`; copy the library to another directory", found.display());
        return Err(failure(message));
    }
    Ok(found)
}

/// Looks a program up as execvp(3) does.
fn find(name: &OsStr) -> Result<PathBuf, Failure> {
    if name.as_bytes().contains(&b'/') {
        return Ok(name.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    let found = std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| {
        file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o111 != 0)
    });
    found.ok_or_else(|| Failure::new(exit::INSPECTOR, format!("{} is not in PATH", name.display())))
}

/// Refuses programs that cannot get the library, and warns of those that may not use it.
fn check(program: &Path) -> Result<(), Failure> {
    let name = program.display();
    let failure = |message: String| Failure::new(exit::INSPECTOR, message);
    let file = File::open(program).map_err(|error| failure(format!("cannot read {name}: {error}")))?;
    let metadata = file.metadata().map_err(|error| failure(format!("cannot read {name}: {error}")))?;
    let privileged = metadata.mode() & 0o6000 != 0
        || rustix::fs::fgetxattr(&file, c"security.capability", &mut [0u8; 64][..]).is_ok();
    if privileged {
        return Err(failure(format!(
            "{name} is setuid, setgid or has file capabilities, so the dynamic loader ignores LD_PRELOAD; start a copy of it without \
             them, as a user with the privileges that it needs"
        )));
    }
    match Elf::read(&file) {
        // A script: its interpreter is an executable of its own.
        None => Ok(()),
        Some(Elf::Other) => Err(failure(format!(
            "{name} is a program for another architecture than Towpath's libnetfilter_queue; use a build for this one"
        ))),
        Some(Elf::Static) => Err(failure(format!(
            "{name} is statically linked, so it cannot get another libnetfilter_queue; use a dynamically linked build, or Towpath's Go \
             package or Rust crate in its source"
        ))),
        Some(Elf::Dynamic(loader)) => {
            if !is_interpreter(program) && !needs_library(&loader, program) {
                say(format_args!(
                    "towpath: warning: {name} is not linked to libnetfilter_queue.so.1; it gets Towpath's queues only if it loads that \
                     library later (a plug-in), and not if it opens a netlink socket of its own"
                ));
            }
            Ok(())
        }
    }
}

/// Interpreters load the library with the modules of their programs.
fn is_interpreter(program: &Path) -> bool {
    let name = program.file_name().unwrap_or_default().as_bytes();
    [&b"python"[..], b"pypy", b"perl", b"ruby", b"lua", b"node", b"env", b"sh", b"bash", b"dash"]
        .iter()
        .any(|interpreter| name.starts_with(interpreter))
}

/// Asks the dynamic loader whether the program or one of its libraries needs libnetfilter_queue. True if the loader does not answer.
fn needs_library(loader: &OsStr, program: &Path) -> bool {
    let program = std::path::absolute(program).unwrap_or_else(|_| program.to_owned());
    let listed = Command::new(loader).arg("--list").arg(program).output();
    let text = listed.ok().filter(|output| output.status.success()).map(|output| output.stdout);
    text.is_none_or(|text| String::from_utf8_lossy(&text).contains("libnetfilter_queue.so.1"))
}

/// An executable in the format ELF (elf(5)).
#[derive(Debug, PartialEq, Eq)]
enum Elf {
    /// Of another class or byte order than this program.
    Other,
    Static,
    /// With this dynamic loader.
    Dynamic(OsString),
}

impl Elf {
    /// Reads the headers. `None` if the file is no executable in this format.
    fn read(file: &File) -> Option<Self> {
        /// Program header: the path of the dynamic loader.
        const PT_INTERP: u32 = 3;
        let mut header = [0; 64];
        file.read_exact_at(&mut header, 0).ok()?;
        if !header.starts_with(b"\x7fELF") {
            return None;
        }
        // ELFCLASS64 and ELFDATA2LSB or ELFDATA2MSB; Towpath is built for 64-bit systems only.
        let order = if cfg!(target_endian = "little") { 1 } else { 2 };
        let machine = header[18..20] == own_machine();
        if header[4] != 2 || header[5] != order || !machine {
            return Some(Self::Other);
        }
        let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        let table = u64::from_ne_bytes(*header[32..].first_chunk()?);
        let (size, count) = (half(54), half(56));
        for index in 0..u64::from(count) {
            let mut entry = [0; 56];
            let at = table.checked_add(index.checked_mul(size.into())?)?;
            file.read_exact_at(&mut entry, at).ok()?;
            if u32::from_ne_bytes(*entry.first_chunk()?) != PT_INTERP {
                continue;
            }
            let offset = u64::from_ne_bytes(*entry[8..].first_chunk()?);
            let length = u64::from_ne_bytes(*entry[32..].first_chunk()?);
            // A path with its NUL (PATH_MAX of limits.h).
            let mut path = vec![0; usize::try_from(length).ok().filter(|length| *length <= 4096)?];
            file.read_exact_at(&mut path, offset).ok()?;
            let path = path.split(|byte| *byte == 0).next().unwrap_or_default();
            return Some(Self::Dynamic(OsStr::from_bytes(path).to_owned()));
        }
        Some(Self::Static)
    }
}

/// `e_machine` of this program.
fn own_machine() -> [u8; 2] {
    let mut header = [0; 20];
    let own = File::open("/proc/self/exe").and_then(|file| file.read_exact_at(&mut header, 0));
    if own.is_ok() { [header[18], header[19]] } else { [0; 2] }
}
