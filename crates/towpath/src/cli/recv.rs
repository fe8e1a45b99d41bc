//! `towpath recv`: receives a file from `towpath send`.

mod greeting;

use std::fs::{File, OpenOptions};
use std::hash::Hasher;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser;
use clap::builder::ValueHint;
use indicatif::ProgressBar;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use serde::Serialize;
use tempfile::NamedTempFile;
use twox_hash::XxHash3_64;

use crate::args::exit;
use crate::cli::send::{progress, seconds};
use crate::cli::transfer::{ALIVE, ALIVE_EVERY, Answer, Header, Record, Status, bytes, cpu_time, read_full};
use crate::cli::{answer, fail, say};

/// Receive a file from `towpath send`
///
/// Waits for a sender, writes the received bytes to FILE, compares checksums with the sender, and exits. FILE appears or is
/// replaced only after it is complete and verified. Holes of a sparse file stay holes. Other clients of the port are refused and
/// reported.
///
/// With `--out -` the bytes go to standard output as they arrive, before they are verified, and the report to standard error: check
/// the exit code.
#[derive(Debug, Parser)]
#[command(
    after_help = "Examples:\n  towpath recv --listen 0.0.0.0:9000 --out copy.bin\n  towpath recv --listen 0.0.0.0:9000 --out - | tar -x"
)]
pub(crate) struct Recv {
    /// Listening address, ADDRESS:PORT; port 0 selects a free port. The address is printed on standard error
    #[arg(long, value_name = "ADDR", value_parser = listen_address)]
    listen: SocketAddr,

    /// The output file; a device such as /dev/null is written directly; `-` is standard output
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    out: PathBuf,

    /// Maximum time without data from the sender, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    timeout: Duration,

    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,
}

/// The JSON object of `--json`.
#[derive(Serialize)]
struct Report {
    from: String,
    bytes: u64,
    seconds: f64,
    bytes_per_second: f64,
    checksum: String,
    cpu_seconds: f64,
}

fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let expected = "expected ADDRESS:PORT, such as 0.0.0.0:9000 or [::]:9000";
    let mut found = text.to_socket_addrs().map_err(|error| format!("{error}; {expected}"))?;
    found.next().ok_or_else(|| format!("no address has this name; {expected}"))
}

pub(crate) fn run(args: &Recv) -> u8 {
    match receive(args) {
        // Standard output has the bytes.
        Ok(report) if is_stdout(&args.out) => {
            say(format_args!("{}", tell(&report, args.json).trim_end()));
            exit::OK
        }
        Ok(report) => answer(exit::OK, &tell(&report, args.json)),
        Err(error) => fail(exit::FAILED, error),
    }
}

fn tell(report: &Report, json: bool) -> String {
    if json {
        return serde_json::to_string(report).expect("strings and numbers serialise") + "\n";
    }
    format!(
        "received {} from {} in {:.2} s: {}/s, checksum {}, as sent\nCPU {:.3} s\n",
        bytes(report.bytes),
        report.from,
        report.seconds,
        bytes(report.bytes_per_second as u64),
        report.checksum,
        report.cpu_seconds,
    )
}

fn receive(args: &Recv) -> Result<Report, String> {
    let mut target = Target::create(&args.out)?;
    let listener =
        TcpListener::bind(args.listen).map_err(|error| format!("listening on {}: {error}", args.listen))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    say(format_args!("listening on {address}"));
    let (mut stream, from, Header { length }) =
        greeting::accept(&listener).map_err(|error| format!("waiting for a sender: {error}"))?;
    drop(listener);
    stream.set_read_timeout(Some(args.timeout)).map_err(|error| error.to_string())?;

    let (start, cpu_before) = (Instant::now(), cpu_time());
    let (received, checksum) = match copy(&mut stream, &mut target, length, from) {
        Ok(whole) => whole,
        Err(Failed::Network(error)) => return Err(error),
        Err(Failed::Disk { error, received }) => {
            let status =
                if error.kind() == ErrorKind::StorageFull { Status::DiskFull } else { Status::CannotWrite };
            let answer = Answer { status, received, checksum: 0, cpu: cpu_time() - cpu_before };
            refuse(stream, &answer);
            let rest = length.map(|length| bytes(length - received.min(length)));
            let rest = rest.map_or_else(String::new, |rest| format!(", {rest} before the end"));
            return Err(format!("writing {}: {error}{rest}", args.out.display()));
        }
    };
    let mut trailer = [0; 8];
    let got = read_full(&mut stream, &mut trailer).map_err(|error| broken(from, &error, received, length))?;
    if got < trailer.len() {
        return Err(format!(
            "{from} ended the connection before it sent its checksum; {} was not created",
            args.out.display()
        ));
    }
    let whole = u64::from_le_bytes(trailer) == checksum;
    let kept = if whole { target.keep(received) } else { Ok(()) };
    let status = match (&kept, whole) {
        (_, false) => Status::Damaged,
        (Ok(()), true) => Status::Whole,
        (Err(_), true) => Status::CannotWrite,
    };
    let cpu = cpu_time() - cpu_before;
    let seconds = start.elapsed().as_secs_f64();
    // If the sender is gone, the answer is lost; the sender reports the failure itself.
    let _ = stream.write_all(&Answer { status, received, checksum, cpu }.emit());
    kept.map_err(|error| format!("writing {}: {error}", args.out.display()))?;
    if !whole {
        let sent = u64::from_le_bytes(trailer);
        return Err(format!(
            "damaged in transit: checksum {checksum:016x}, the sender's is {sent:016x}; nothing is kept"
        ));
    }
    Ok(Report {
        from: from.to_string(),
        bytes: received,
        seconds,
        bytes_per_second: received as f64 / seconds,
        checksum: format!("{checksum:016x}"),
        cpu_seconds: cpu.as_secs_f64(),
    })
}

enum Failed {
    Network(String),
    Disk { error: io::Error, received: u64 },
}

fn copy(
    stream: &mut TcpStream,
    target: &mut Target,
    length: Option<u64>,
    from: SocketAddr,
) -> Result<(u64, u64), Failed> {
    let bar = length.map_or_else(ProgressBar::hidden, progress);
    let mut hash = XxHash3_64::new();
    let mut buffer = vec![0; 256 << 10];
    let (mut received, mut said) = (0, Instant::now());
    loop {
        let network = |error: &io::Error| Failed::Network(broken(from, error, received, length));
        let mut word = [0; 8];
        match read_full(stream, &mut word) {
            Ok(8) => {}
            Ok(_) => return Err(network(&ErrorKind::UnexpectedEof.into())),
            Err(error) => return Err(network(&error)),
        }
        let (hole, mut left) = match Record::parse(word) {
            Record::End => break,
            Record::Data(bytes) => (false, bytes),
            Record::Hole(bytes) => (true, bytes),
        };
        // The sender could otherwise write more than it announced, or past the largest offset.
        let most = length.unwrap_or(i64::MAX as u64);
        if received.checked_add(left).is_none_or(|end| end > most) {
            return Err(Failed::Network(format!("{from} sends more than it announced; nothing is kept")));
        }
        if hole {
            hash.write(&word);
            if target.skip(left).map_err(|error| Failed::Disk { error, received })? {
                received += left;
                continue;
            }
            buffer.fill(0);
        }
        while left > 0 {
            if said.elapsed() >= ALIVE_EVERY {
                said = Instant::now();
                // If the sender is gone, the next read fails.
                let _ = stream.write_all(&[ALIVE]);
            }
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let network = |error: &io::Error| Failed::Network(broken(from, error, received, length));
            let got = if hole { Ok(most) } else { stream.read(&mut buffer[..most]) };
            let len = match got {
                Ok(len) if hole => len,
                Ok(0) => return Err(network(&ErrorKind::UnexpectedEof.into())),
                Ok(len) => {
                    hash.write(&buffer[..len]);
                    len
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(network(&error)),
            };
            target.write(&buffer[..len]).map_err(|error| Failed::Disk { error, received })?;
            received += len as u64;
            left -= len as u64;
            bar.set_position(received);
        }
    }
    bar.finish_and_clear();
    if length.is_some_and(|length| received != length) {
        return Err(Failed::Network(broken(from, &ErrorKind::UnexpectedEof.into(), received, length)));
    }
    Ok((received, hash.finish()))
}

/// Sends the answer, then reads until the sender stops. Closing a connection with unread bytes resets it, which would discard
/// the answer.
fn refuse(mut stream: TcpStream, answer: &Answer) {
    if stream.write_all(&answer.emit()).is_err() {
        return;
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut rest = vec![0; 256 << 10];
    while matches!(stream.read(&mut rest), Ok(len) if len > 0) {}
}

fn broken(from: SocketAddr, error: &io::Error, received: u64, length: Option<u64>) -> String {
    let of = length.map_or_else(String::new, |length| format!(" of {length}"));
    let why = match error.kind() {
        ErrorKind::UnexpectedEof => "ended the connection".to_owned(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "sent nothing within the time limit".to_owned(),
        _ => format!("is gone ({error})"),
    };
    format!("truncated: {from} {why} after {received}{of} bytes; nothing is kept")
}

/// The output: a file that gets its name when it is complete, or an existing non-regular file.
enum Target {
    /// An unnamed file (O_TMPFILE): nothing remains if the receiver dies.
    Nameless(File, PathBuf),
    /// A named temporary file, for file systems without O_TMPFILE.
    Temporary(NamedTempFile, PathBuf),
    Device(File),
}

/// Mode of a new file, before the umask is applied.
const NEW_FILE: u32 = 0o666;

impl Target {
    fn create(path: &Path) -> Result<Self, String> {
        if is_stdout(path) {
            let stdout = io::stdout().as_fd().try_clone_to_owned();
            return stdout
                .map(|stdout| Self::Device(stdout.into()))
                .map_err(|error| format!("standard output: {error}"));
        }
        let there = std::fs::metadata(path).ok();
        let made = match &there {
            Some(there) if !there.is_file() => special(path, there.file_type().is_fifo()).map(Self::Device),
            _ => Self::file(path, there.map(|there| there.permissions())),
        };
        made.map_err(|error| format!("making {}: {error}", path.display()))
    }

    /// Creates a new file with the permissions of the file that it will replace.
    fn file(path: &Path, permissions: Option<std::fs::Permissions>) -> io::Result<Self> {
        let directory = directory_of(path);
        let mode = Mode::from_raw_mode(NEW_FILE);
        match rustix::fs::open(directory, OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC, mode) {
            Ok(file) => {
                let file = File::from(file);
                permissions.map_or(Ok(()), |permissions| file.set_permissions(permissions))?;
                Ok(Self::Nameless(file, path.to_owned()))
            }
            // The errors of open(2) for a file system or kernel without O_TMPFILE.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR | rustix::io::Errno::INVAL) => {
                let permissions = permissions.unwrap_or(std::fs::Permissions::from_mode(NEW_FILE));
                let file = tempfile::Builder::new()
                    .prefix(TEMPORARY)
                    .permissions(permissions)
                    .tempfile_in(directory)?;
                Ok(Self::Temporary(file, path.to_owned()))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Nameless(file, _) | Self::Device(file) => file.write_all(bytes),
            Self::Temporary(file, _) => file.write_all(bytes),
        }
    }

    /// Leaves a hole. Returns false if the output has none, and zeros are to be written.
    fn skip(&mut self, bytes: u64) -> io::Result<bool> {
        let by = SeekFrom::Current(i64::try_from(bytes).map_err(|_| ErrorKind::FileTooLarge)?);
        match self {
            Self::Nameless(file, _) => file.seek(by)?,
            Self::Temporary(file, _) => file.seek(by)?,
            Self::Device(_) => return Ok(false),
        };
        Ok(true)
    }

    /// Gives the file its length, which may end with a hole, and its name.
    fn keep(self, length: u64) -> io::Result<()> {
        match &self {
            Self::Nameless(file, _) => file.set_len(length)?,
            Self::Temporary(file, _) => file.as_file().set_len(length)?,
            Self::Device(_) => {}
        }
        match self {
            Self::Nameless(file, path) => {
                // linkat(2) does not replace an existing file: link under a temporary name, then rename.
                let named = directory_of(&path).join(format!("{TEMPORARY}{}", std::process::id()));
                let own = format!("/proc/self/fd/{}", file.as_raw_fd());
                rustix::fs::linkat(CWD, own, CWD, &named, AtFlags::SYMLINK_FOLLOW)?;
                let kept = std::fs::rename(&named, path);
                if kept.is_err() {
                    // The error of the rename is reported; a failure to clean up is ignored.
                    let _ = std::fs::remove_file(&named);
                }
                kept
            }
            Self::Temporary(file, path) => file.persist(path).map(drop).map_err(|error| error.error),
            Self::Device(_) => Ok(()),
        }
    }
}

/// Returns true for `-`, standard output.
fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// Opens an existing non-regular file. A FIFO without a reader is an error; the open does not block.
fn special(path: &Path, fifo: bool) -> io::Result<File> {
    let flags = if fifo { OFlags::NONBLOCK } else { OFlags::empty() };
    let file = OpenOptions::new().write(true).custom_flags(flags.bits() as i32).open(path);
    let file = file.map_err(|error| match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::NXIO.raw_os_error() && fifo => {
            io::Error::new(ErrorKind::NotConnected, "this FIFO has no reader; start the reader first")
        }
        _ => error,
    })?;
    rustix::fs::fcntl_setfl(&file, OFlags::empty())?;
    Ok(file)
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Name prefix of temporary files.
const TEMPORARY: &str = ".towpath-recv-";
