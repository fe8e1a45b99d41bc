//! A `towpath mux` process for tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

pub(crate) use crate::example::example;

pub(crate) const FRAMING: &str = "offset=0 length=4 be adjust=4";

pub(crate) fn towpath() -> Command {
    Command::new(env!("CARGO_BIN_EXE_towpath"))
}

/// Workers that get one message at a time, and up to sixteen.
pub(crate) fn workers() -> [String; 2] {
    let worker = example("mux_worker");
    [worker.clone(), format!("{worker} 16")]
}

pub(crate) struct Mux {
    child: Child,
    stderr: BufReader<ChildStderr>,
    /// The lines of its log that were read.
    log: String,
    pub(crate) address: String,
}

impl Mux {
    pub(crate) fn start(worker: &str, more: &[&str]) -> Self {
        Self::listen("127.0.0.1:0", worker, more)
    }

    pub(crate) fn listen(address: &str, worker: &str, more: &[&str]) -> Self {
        Self::begin(towpath(), address, worker, more)
    }

    /// Starts it under a resource limit, given as shell words.
    pub(crate) fn limited(limit: &str, worker: &str, more: &[&str]) -> Self {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{limit}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_towpath")]);
        Self::begin(shell, "127.0.0.1:0", worker, more)
    }

    pub(crate) fn begin(mut command: Command, address: &str, worker: &str, more: &[&str]) -> Self {
        let mut child = command
            .args(["mux", address])
            // Without one, its workers are on other machines.
            .args(["--worker", worker].iter().filter(|_| !worker.is_empty()))
            .args(["--framing", FRAMING].iter().filter(|_| !more.contains(&"--framing")))
            // A busy machine may need longer than the default timeout.
            .args(["--drain", "120"].iter().filter(|_| !more.contains(&"--drain")))
            .args(more)
            .stderr(Stdio::piped())
            .spawn()
            .expect("towpath starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("a line");
        let address =
            line.strip_prefix("listening on ").unwrap_or_else(|| panic!("{line}")).trim().to_owned();
        let mut mux = Self { child, stderr, log: String::new(), address };
        mux.until(" attached");
        mux
    }

    /// Reads its log until a line contains `what`.
    pub(crate) fn until(&mut self, what: &str) -> String {
        loop {
            let line = self.line(what);
            if line.contains(what) {
                return line;
            }
        }
    }

    /// The next line of its log, which continues for `what`.
    pub(crate) fn line(&mut self, what: &str) -> String {
        let mut line = String::new();
        let more = self.stderr.read_line(&mut line).expect("text") > 0;
        assert!(more, "it ended without: {what}; its log:\n{}", self.log);
        self.log += &line;
        line
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        stream
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.child.id(), signal);
    }

    /// Drains it. Returns its exit code and the rest of its log.
    pub(crate) fn finish(self) -> (Option<i32>, String) {
        self.signal(Signal::TERM);
        self.ended()
    }

    /// As above, if the signal was sent before: a second signal would end the drain.
    pub(crate) fn ended(mut self) -> (Option<i32>, String) {
        let mut errors = String::new();
        self.stderr.read_to_string(&mut errors).expect("text");
        (self.child.wait().expect("its end").code(), errors)
    }
}

impl Drop for Mux {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn kill(pid: u32, signal: Signal) {
    // It may have exited already.
    let _ = kill_process(Pid::from_raw(pid as i32).expect("a process"), signal);
}

pub(crate) fn message(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_be_bytes()[..], body].concat()
}

pub(crate) fn answer(stream: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut body = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut body)?;
    Ok(body)
}

pub(crate) fn ask(stream: &mut (impl Read + Write), body: &[u8]) -> Vec<u8> {
    stream.write_all(&message(body)).expect("it is open");
    answer(stream).expect("an answer")
}

/// The process that answered: examples/mux_worker.rs replies with its process id, a space and the request.
pub(crate) fn split(answer: &[u8]) -> (u32, &[u8]) {
    let at = answer.iter().position(|&byte| byte == b' ').expect("a space");
    (String::from_utf8_lossy(&answer[..at]).parse().expect("a process id"), &answer[at + 1..])
}

/// "R of N messages: D done" in the last line.
pub(crate) fn counted(errors: &str) -> (u64, u64, u64, u64) {
    let before = |word| reported(errors, word);
    (before(" messages:"), before(" done"), before(" given up"), before(" not begun"))
}

/// The number of discarded messages in the last line.
pub(crate) fn discarded(errors: &str) -> u64 {
    reported(errors, " discarded")
}

fn reported(errors: &str, word: &str) -> u64 {
    let line =
        errors.lines().rev().find(|line| line.contains(" messages: ")).unwrap_or_else(|| panic!("{errors}"));
    let at = line.find(word).unwrap_or_else(|| panic!("{line}"));
    line[..at].trim().rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}
