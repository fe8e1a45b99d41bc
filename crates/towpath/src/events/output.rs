//! Where event lines go: a file, a Unix socket, or standard output. Nothing here waits for a reader.
//!
//! Lines wait in a buffer of [`BUFFER`] bytes. A line without room is lost and counted. After an error, the output is opened again once per
//! second, and a line that was written in part is not continued.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;

use crate::config::EventOutput;

/// Bytes of lines that may wait.
pub(super) const BUFFER: usize = 4 << 20;

/// Bytes of one write to a pipe that poll(2) reports writable: PIPE_BUF. Such a write does not wait.
const PIPE: usize = 4096;

/// Bytes of one write to a file or a socket.
const CHUNK: usize = 64 << 10;

/// Time between two attempts to open the output.
const RETRY: Duration = Duration::from_secs(1);

/// Permissions of a new file.
const MODE: u32 = 0o640;

#[derive(Debug)]
enum Sink {
    File(std::fs::File),
    Socket(UnixStream),
    Stdout(io::Stdout),
}

impl AsFd for Sink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::File(file) => file.as_fd(),
            Self::Socket(socket) => socket.as_fd(),
            Self::Stdout(stdout) => stdout.as_fd(),
        }
    }
}

impl Sink {
    fn open(output: &EventOutput) -> io::Result<Self> {
        match output {
            EventOutput::File(path) => {
                // O_NONBLOCK: opening a FIFO without a reader fails, and writing to a full one does not wait.
                let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
                let mut options = OpenOptions::new();
                let file = options.append(true).create(true).mode(MODE).custom_flags(flags).open(path)?;
                Ok(Self::File(file))
            }
            EventOutput::Unix(path) => {
                let socket = UnixStream::connect(path)?;
                socket.set_nonblocking(true)?;
                Ok(Self::Socket(socket))
            }
            EventOutput::Stdout => Ok(Self::Stdout(io::stdout())),
        }
    }

    /// Writes some bytes, if that does not wait.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut fds = [PollFd::new(&*self, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut fds, Some(&now))? == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        match self {
            Self::File(file) => file.write(&bytes[..bytes.len().min(CHUNK)]),
            Self::Socket(socket) => socket.write(&bytes[..bytes.len().min(CHUNK)]),
            // Not through Rust's buffer, whose flush would write as often as it needs.
            Self::Stdout(stdout) => Ok(rustix::io::write(stdout, &bytes[..bytes.len().min(PIPE)])?),
        }
    }
}

/// The output and the lines that wait.
#[derive(Debug)]
pub(super) struct Output {
    target: EventOutput,
    sink: Option<Sink>,
    /// When the output is opened next, after an error.
    retry: Option<Instant>,
    waiting: Vec<u8>,
    /// Bytes of `waiting` that were written.
    written: usize,
    /// Lines that were lost since the last line that says so.
    untold: u64,
    /// All lost lines, and all errors.
    pub(super) lost: u64,
    pub(super) errors: u64,
    /// Lines that were put into the buffer, and bytes that were written.
    pub(super) lines: u64,
    pub(super) bytes: u64,
}

impl Output {
    /// Opens the output. A Unix socket that does not exist yet is tried again later.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(super) fn open(target: EventOutput) -> io::Result<Self> {
        let mut output = Self {
            target,
            sink: None,
            retry: None,
            waiting: Vec::new(),
            written: 0,
            untold: 0,
            lost: 0,
            errors: 0,
            lines: 0,
            bytes: 0,
        };
        match Sink::open(&output.target) {
            Ok(sink) => output.sink = Some(sink),
            Err(error) if matches!(output.target, EventOutput::Unix(_)) => {
                output.fail(&error, Instant::now())
            }
            Err(error) => return Err(error),
        }
        Ok(output)
    }

    /// Opens the file again, because it was renamed. The old one stays if that fails.
    pub(super) fn reopen(&mut self, now: Instant) {
        if !matches!(self.target, EventOutput::File(_)) {
            return;
        }
        // The old file gets the rest of its lines; a disk takes them at once.
        self.write(now);
        match Sink::open(&self.target) {
            Ok(sink) => {
                self.skip_partial();
                (self.sink, self.retry) = (Some(sink), None);
            }
            Err(error) => {
                self.errors += 1;
                log::warn!("events: {} is not opened again: {error}; the old file is used", self.target);
            }
        }
    }

    /// Adds lines. `told` makes the line with the number of lost ones.
    pub(super) fn put(&mut self, lines: &[u8], told: impl FnOnce(u64, &mut Vec<u8>)) {
        let count = lines.iter().filter(|byte| **byte == b'\n').count() as u64;
        if self.waiting.len() - self.written + lines.len() > BUFFER {
            self.lost += count;
            self.untold += count;
            return;
        }
        if self.written > BUFFER {
            self.waiting.drain(..self.written);
            self.written = 0;
        }
        if self.untold > 0 {
            told(std::mem::take(&mut self.untold), &mut self.waiting);
        }
        self.waiting.extend_from_slice(lines);
        self.lines += count;
    }

    /// Returns true if lines wait.
    pub(super) fn is_waiting(&self) -> bool {
        self.written < self.waiting.len()
    }

    /// Writes what the output takes without waiting. Returns true if it took something.
    pub(super) fn write(&mut self, now: Instant) -> bool {
        if self.sink.is_none() && self.retry.is_none_or(|at| now >= at) {
            match Sink::open(&self.target) {
                Ok(sink) => {
                    (self.sink, self.retry) = (Some(sink), None);
                    log::info!("events: {} is open", self.target);
                }
                Err(error) => self.fail(&error, now),
            }
        }
        let mut took = false;
        while let Some(sink) = self.sink.as_mut().filter(|_| self.written < self.waiting.len()) {
            match sink.write(&self.waiting[self.written..]) {
                Ok(0) => break,
                Ok(bytes) => {
                    self.written += bytes;
                    self.bytes += bytes as u64;
                    took = true;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => {
                    self.fail(&error, now);
                    break;
                }
            }
        }
        if self.written == self.waiting.len() {
            self.waiting.clear();
            self.written = 0;
        }
        took
    }

    fn fail(&mut self, error: &io::Error, now: Instant) {
        self.errors += 1;
        if self.retry.is_none() {
            log::warn!("events: {}: {error}; the engine tries again every second", self.target);
        }
        self.sink = None;
        self.retry = Some(now + RETRY);
        self.skip_partial();
    }

    /// The next reader begins at a whole line.
    fn skip_partial(&mut self) {
        if self.written > 0 && self.waiting.get(self.written - 1) != Some(&b'\n') {
            let rest = self.waiting[self.written..].iter().position(|byte| *byte == b'\n');
            self.written = rest.map_or(self.waiting.len(), |at| self.written + at + 1);
            self.lost += 1;
            self.untold += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};
    use std::net::Shutdown;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn told(count: u64, out: &mut Vec<u8>) {
        writeln!(out, "lost {count}").unwrap();
    }

    #[test]
    fn a_file_is_opened_again_after_it_was_renamed() {
        let directory = tempfile::tempdir().unwrap();
        let (path, old) = (directory.path().join("events"), directory.path().join("events.1"));
        let mut output = Output::open(EventOutput::File(path.clone())).unwrap();
        let now = Instant::now();
        output.put(b"one\n", told);
        assert!(output.write(now));
        std::fs::rename(&path, &old).unwrap();
        output.put(b"two\n", told);
        output.reopen(now);
        output.put(b"three\n", told);
        output.write(now);
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "one\ntwo\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "three\n");
        assert_eq!((output.lines, output.bytes, output.lost), (3, 14, 0));
        // Not in a directory that is gone: the old file stays.
        std::fs::rename(&path, &old).unwrap();
        std::fs::create_dir(&path).unwrap();
        output.reopen(now);
        output.put(b"four\n", told);
        output.write(now);
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "three\nfour\n");
        assert_eq!(output.errors, 1);
        assert!(Output::open(EventOutput::File(path)).is_err());
    }

    #[test]
    fn a_socket_that_is_not_read_loses_lines_and_says_how_many() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events.sock");
        // No reader yet: the lines wait.
        let mut output = Output::open(EventOutput::Unix(path.clone())).unwrap();
        let now = Instant::now();
        let listener = UnixListener::bind(&path).unwrap();
        output.put(b"first\n", told);
        assert!(!output.write(now));
        let later = now + 2 * RETRY;
        assert!(output.write(later));
        let (stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream);
        let line = [b"x".repeat(999), b"\n".to_vec()].concat();
        let mut put = 0;
        while output.lost < 5 {
            output.put(&line, told);
            output.write(later);
            put += 1;
        }
        let mut text = String::new();
        let mut taken = 0;
        reader.read_line(&mut text).unwrap();
        assert_eq!(text, "first\n");
        let mut chunk = vec![0; 1 << 20];
        while output.is_waiting() {
            taken += reader.read(&mut chunk).unwrap();
            output.write(later);
        }
        output.put(b"last\n", told);
        output.write(later);
        while output.is_waiting() {
            taken += reader.read(&mut chunk).unwrap();
            output.write(later);
        }
        drop(output);
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        let end = b"lost 5\nlast\n";
        assert!(rest.ends_with(end), "{:?}", String::from_utf8_lossy(&rest[rest.len().saturating_sub(40)..]));
        assert_eq!(taken + rest.len() - end.len(), (put - 5) * 1000);
    }

    #[test]
    fn a_reader_that_returns_begins_at_a_whole_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let mut output = Output::open(EventOutput::Unix(path)).unwrap();
        let now = Instant::now();
        let (stream, _) = listener.accept().unwrap();
        let line = [b"y".repeat(9_999), b"\n".to_vec()].concat();
        // More than the socket takes.
        for _ in 0..200 {
            output.put(&line, told);
        }
        output.write(now);
        assert!(output.is_waiting());
        // Not by a drop: a child that another test has forked holds a copy until it calls execve(2).
        stream.shutdown(Shutdown::Both).unwrap();
        output.write(now);
        let later = now + 2 * RETRY;
        output.write(later);
        let (stream, _) = listener.accept().unwrap();
        let mut first = String::new();
        let mut reader = BufReader::new(stream);
        reader.read_line(&mut first).unwrap();
        assert_eq!(first.len(), 10_000);
        assert!(output.errors >= 1);
    }

    #[test]
    fn a_fifo_without_a_reader_does_not_stop_the_engine() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
            .unwrap();
        let error = Output::open(EventOutput::File(path)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::NXIO.raw_os_error()));
    }
}
