//! A process of the demo: this executable on one of the hosts. It is killed when the demo ends.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde_json::Value;
use towpath_port::{Burst, Port, QueueVerdict, Received, nfqueue};
use towpath_ring::Worker;

use super::netns_host::NetnsHost;
use super::{Failure, Stop, doing};
use crate::say;

/// The pattern that inspectors drop.
pub(super) const PATTERN: &str = "password=";

/// Time in which a process must be ready.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// Dropping it kills the process.
#[derive(Debug)]
pub(super) struct Process {
    name: &'static str,
    child: Child,
    said: PathBuf,
    answered: PathBuf,
}

impl Process {
    /// Starts `towpath` with these arguments on `host`. Its output goes to files in `directory`, its working directory.
    pub(super) fn start(
        host: &NetnsHost,
        directory: &Path,
        name: &'static str,
        words: &[&str],
    ) -> Result<Self, Failure> {
        Self::start_part(host, directory, name, &[&["exec", "--"], words].concat())
    }

    /// Starts another program in the same way.
    pub(super) fn start_program(
        host: &NetnsHost,
        directory: &Path,
        name: &'static str,
        program: &Path,
        words: &[&str],
    ) -> Result<Self, Failure> {
        let program =
            program.to_str().ok_or_else(|| Failure::Missing(format!("the path of {name} is not UTF-8")))?;
        Self::start_part(host, directory, name, &[&["program", "--", program], words].concat())
    }

    fn start_part(
        host: &NetnsHost,
        directory: &Path,
        name: &'static str,
        words: &[&str],
    ) -> Result<Self, Failure> {
        let said = directory.join(format!("{name}.err"));
        let answered = directory.join(format!("{name}.out"));
        let mut command = Command::new(this_program()?);
        command
            .arg("demo-part")
            .args(words)
            .current_dir(directory)
            // Temporary files of a killed process are removed with the directory.
            .env("TMPDIR", directory)
            .stdin(Stdio::null())
            .stdout(File::create(&answered).map_err(doing(name))?)
            .stderr(File::create(&said).map_err(doing(name))?);
        // The parent is the host's thread: the process is killed when that thread ends.
        let child = host.run(move || command.spawn()).map_err(doing(name))?;
        Ok(Self { name, child, said, answered })
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Standard error so far.
    pub(super) fn said(&self) -> String {
        std::fs::read_to_string(&self.said).unwrap_or_default()
    }

    /// The listening address that the process reported.
    pub(super) fn listening(&self) -> Result<SocketAddr, Failure> {
        let said = self.said();
        let mut words = said.lines().filter_map(|line| line.strip_prefix("listening on "));
        let address = words.next().and_then(|address| address.trim().parse().ok());
        address.ok_or_else(|| self.broken("does not say where it listens"))
    }

    /// Waits until `ready` returns true.
    pub(super) fn wait_until(
        &mut self,
        stop: &Stop,
        mut ready: impl FnMut(&Self) -> bool,
    ) -> Result<(), Failure> {
        let name = self.name;
        let met = stop.until(PATIENCE, || match self.child.try_wait().map_err(doing(name))? {
            Some(status) => Err(self.broken(&format!("ended ({status})"))),
            None => Ok(ready(self)),
        })?;
        if met { Ok(()) } else { Err(self.broken("did not get ready")) }
    }

    /// Waits for the end. Returns standard output.
    pub(super) fn answer(mut self, stop: &Stop, patience: Duration) -> Result<String, Failure> {
        let name = self.name;
        let mut ended = None;
        stop.until(patience, || {
            ended = self.child.try_wait().map_err(doing(name))?;
            Ok(ended.is_some())
        })?;
        match ended {
            Some(status) if status.success() => std::fs::read_to_string(&self.answered).map_err(doing(name)),
            Some(status) => Err(self.broken(&format!("ended ({status})"))),
            None => Err(self.broken("did not end")),
        }
    }

    /// Sends SIGTERM and waits. Returns the exit status.
    pub(super) fn stop(&mut self) -> Result<ExitStatus, Failure> {
        let name = self.name;
        // The process may have ended already; the wait reports it.
        let _ = kill_process(self.pid(), Signal::TERM);
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().map_err(doing(name))? {
                return Ok(status);
            }
            if Instant::now() > end {
                return Err(self.broken("did not end when it was told to"));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal.
    pub(super) fn signal(&self, signal: Signal) {
        // The process may have ended already; the next wait reports it.
        let _ = kill_process(self.pid(), signal);
    }

    /// CPU time used so far in seconds (proc_pid_stat(5): utime and stime).
    pub(super) fn cpu(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // The name may contain spaces; fields 3 and following come after its bracket.
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let ticks: u64 =
            rest.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        ticks as f64 / rustix::param::clock_ticks_per_second() as f64
    }

    fn broken(&self, what: &str) -> Failure {
        let said = self.said();
        let said: Vec<&str> = said.lines().rev().take(3).collect();
        let said = said.into_iter().rev().collect::<Vec<_>>().join("; ");
        Failure::Broken(format!("towpath {} {what}: {said}", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `towpath ctl` against a running engine. Returns `None` without an answer.
pub(super) fn ctl(socket: &Path, words: &str) -> Option<Value> {
    let mut command = Command::new(this_program().ok()?);
    command.arg("ctl").arg("--socket").arg(socket).args(words.split_whitespace()).arg("--json");
    let output = command.stdin(Stdio::null()).output().ok()?;
    if !output.status.success() {
        return None;
    }
    serde_json::from_slice(&output.stdout).ok()
}

/// The command line of a command of this executable, for `--worker` and `command`.
pub(super) fn command(words: &[&str]) -> Result<String, Failure> {
    let program = this_program()?;
    let program =
        program.to_str().ok_or_else(|| Failure::Missing("this program's path is not UTF-8".into()))?;
    Ok(shell_words::join(std::iter::once(program).chain(words.iter().copied())))
}

fn this_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(doing("this program"))
}

/// The child side of [`Process::start`]: executes `towpath WORDS`, to be killed when the demo ends.
pub(crate) fn exec(words: &[String]) -> io::Error {
    match std::env::current_exe() {
        Ok(program) => exec_as(&program, words),
        Err(error) => error,
    }
}

/// The child side of [`Process::start_program`]: the first word is the program.
pub(crate) fn exec_program(words: &[String]) -> io::Error {
    match words {
        [program, words @ ..] => exec_as(Path::new(program), words),
        [] => io::Error::other("no program"),
    }
}

/// Executes a program, to be killed when the demo ends.
fn exec_as(program: &Path, words: &[String]) -> io::Error {
    match set_parent_process_death_signal(Some(Signal::KILL)) {
        Ok(()) => Command::new(program).args(words).exec(),
        Err(error) => error.into(),
    }
}

/// A worker of the message server: takes a millisecond for each line and answers with its process id.
pub(crate) fn worker() -> Result<(), String> {
    let mut worker = Worker::attach_env().map_err(|error| error.to_string())?;
    let pid = std::process::id();
    while let Some(message) = worker.recv().map_err(|error| error.to_string())? {
        thread::sleep(Duration::from_millis(1));
        let mut answer = format!("{pid} ").into_bytes();
        answer.extend_from_slice(worker.bytes(&message));
        worker.reply(&message, &answer).map_err(|error| error.to_string())?;
        worker.done(message);
    }
    Ok(())
}

/// The comparison with the kernel: a consumer of NFQUEUE that searches payloads as `towpath inspect` does.
pub(crate) fn queue(number: u16) -> Result<(), String> {
    let text = |error: towpath_port::Error| error.to_string();
    let pattern = regex::bytes::Regex::new(PATTERN).map_err(|error| error.to_string())?;
    let mut port = nfqueue::Queue::open(nfqueue::Config::new(number)).map_err(text)?;
    let mut burst = Burst::new(64);
    say("ready");
    loop {
        match port.receive(&mut burst).map_err(text)? {
            Received::End => return Ok(()),
            Received::Nothing => {
                let Some(fd) = port.poll_fd() else { return Ok(()) };
                let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut fds, None).map_err(|error| error.to_string())?;
            }
            Received::Frames => {
                for frame in burst.iter() {
                    let found = pattern.is_match(frame.bytes);
                    port.verdict(frame, if found { QueueVerdict::Drop } else { QueueVerdict::Accept })
                        .map_err(text)?;
                }
                port.flush().map_err(text)?;
            }
        }
    }
}
